#pragma once
// ShardingEngine: owns a model's units as shards and lends the model full weights and gradients.
//
// Weights of a unit are all-gathered on a transfer stream into one of a few full-size slots, up to `prefetch`
// units ahead of the one in use, and leased to the model; a released slot goes to the next unit once the
// compute stream has passed the release. Gradients are written to full-size slots and reduced when their
// lease is released: reduce-scatter over the shard group into the shard's accumulator and, after the last
// micro-step, all-reduce over the replica group, beside the rest of backward. With one shard nothing is
// gathered or copied: leases are the shard itself.
//
//   engine.begin_step(step);
//   for k in 0 .. K-1:
//     engine.begin_micro_step(k);
//     model forward and backward, which lease from the engine
//   engine.finish_gradients();     compute stream: every shard().gradient is the group's sum
//   optimizer.step(...)            updates shards, sets their `ready` events
//
// Leases throw InternalError when used after release or after the weights have moved on to another step, when
// a unit is leased twice at once, and when units are asked for out of order. A lease released while an
// exception unwinds starts no reduction.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/ops.h"
#include "backend/units.h"
#include "sharding/mesh.h"
#include "sharding/options.h"
#include "sharding/plan.h"
#include "sharding/unit_shard.h"

namespace strata {

class ShardingEngine final : public ParameterSource, public LeaseOwner {
 public:
  // Everything is referenced, not copied, except `units` and `options`. All memory is allocated here.
  ShardingEngine(std::vector<UnitSpec> units, const MeshGroups& groups, Device& device, Ops& ops,
                 Stream& compute, const EngineOptions& options);
  ~ShardingEngine() override;
  ShardingEngine(const ShardingEngine&) = delete;
  ShardingEngine& operator=(const ShardingEngine&) = delete;

  // Initial weights, the same on every mesh. Moments are zeroed.
  void initialize(std::uint64_t seed);
  // After someone wrote the shards' parameters on the compute stream (import, resume): refreshes what is
  // gathered.
  void parameters_changed();

  void begin_step(std::int64_t step);
  void begin_micro_step(int k);
  void finish_gradients();
  // One forward pass over the present weights; its traffic has an account of its own.
  void begin_evaluation(std::int64_t step);
  void end_evaluation();

  Lease weights(int unit, Pass pass) override;
  Lease gradient(int unit) override;
  void release(std::int64_t ticket) override;
  void check(std::int64_t ticket) const override;

  const std::vector<UnitSpec>& units() const { return units_; }
  std::vector<UnitShard>& shards() { return shards_; }
  const std::vector<UnitShard>& shards() const { return shards_; }
  const EngineOptions& options() const { return options_; }

  // Whole unit on the host in fp32 (bf16 values are exact), without padding. Collective over the shard group;
  // waits.
  std::vector<float> gather_parameters(int unit);
  std::vector<float> gather_gradients(int unit);

  // Called with a unit's index each time before its weights are about to be gathered (or leased, with one
  // shard): whoever still has to change them enqueues that now, and it then goes first.
  void set_before_gather(std::function<void(int unit)> hook);

 private:
  class Impl;
  std::vector<UnitSpec> units_;
  EngineOptions options_;
  std::vector<UnitShard> shards_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
