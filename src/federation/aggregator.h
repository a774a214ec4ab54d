#pragma once
// Aggregator: what happens to one unit's shard when its federation group aggregates. It owns the outer state;
// the scheduler decides when.
//
//   reduce   delta = theta_old - theta, averaged over the federation peers (by a sender only, with `replicas:
//   one`) share    `replicas: one`: the sender's average goes to the other replicas apply    the outer rule:
//   theta_old, momentum and the unit's parameters move to the new global model
//
// FedAvg with eta 1 needs no reference: reduce averages the parameters themselves, when they can travel as
// they are (fp32 on an fp32 wire; bf16 parameters travel as bf16, since a wider wire would carry no more).
// With one federation group and neither momentum nor eta every rule is the identity, and nothing happens at
// all.
#include <cstdint>
#include <vector>

#include "backend/ops.h"
#include "federation/options.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"

namespace strata {

// int8 travels as blocks of this many elements with an fp32 scale each.
constexpr std::int64_t kQuantizationBlock = 256;

// How a unit's shard is aggregated; shared by the aggregator and the plans.
struct AggregationKind {
  bool identity = false;         // nothing to do
  bool parameters = false;       // averages parameters, no reference kept
  bool broadcasts = false;       // senders broadcast to their replicas
  DType reduced = DType::f32;    // what the all-reduce moves; i8: all-gather
  DType broadcast = DType::f32;  // what the broadcast moves
};
// One group exchanges nothing: its deltas stay fp32.
FederationOptions effective_options(FederationOptions options, const Mesh& mesh);
AggregationKind aggregation_kind(const Mesh& mesh, const Precision& precision,
                                 const FederationOptions& options);

// Bytes of one rank's quantized shard: the int8 values, then the scales.
std::int64_t quantized_bytes(std::int64_t count);

class Aggregator {
 public:
  // A lane is a stream with the scratch of one unit in progress; work on different lanes is independent.
  // keep_deltas: every unit's averaged delta has a place of its own until it is applied.
  Aggregator(ShardingEngine& engine, const MeshGroups& groups, Device& device, Ops& ops, Stream& compute,
             const FederationOptions& options, int lanes, bool keep_deltas);

  const AggregationKind& kind() const { return kind_; }
  void initialize();

  // weights: (F) int64 in device memory and the same on the host, or nullptr for equal ones.
  struct Weights {
    const std::int64_t* device = nullptr;
    const std::int64_t* host = nullptr;
    Event ready;  // the device copy is complete
  };
  void reduce(int lane, int unit, std::int64_t step, const Weights& weights);
  void share(int lane, int unit, std::int64_t step);
  void apply(int lane, int unit, float alpha);

  Stream& stream(int lane) { return lanes_[static_cast<std::size_t>(lane)].stream; }

  // Outer state of a unit: fp32, shard-sized, in host memory with `offload`. Empty where the rule has none.
  struct State {
    Flat theta_old, momentum, error, delta;
  };
  const State& state(int unit) const { return states_[static_cast<std::size_t>(unit)]; }

 private:
  struct Lane {
    Stream& stream;
    Flat delta, wire, quantized, gathered;
    Flat theta_old, momentum, error;  // staging for `offload`
  };
  void allocate(int lanes, bool keep_deltas);
  Flat delta(const Lane& lane, int unit) const;
  Flat fetch(const Lane& lane, const Flat& staging, const Flat& state);
  void store(const Lane& lane, const Flat& state, const Flat& staged);
  void reduce_quantized(const Lane& lane, const CollectiveLabel& label, int unit, const Weights& weights);
  CollectiveLabel label(int unit, std::int64_t step) const;
  bool sender() const;
  UnitShard& shard(int unit) { return engine_.shards()[static_cast<std::size_t>(unit)]; }

  ShardingEngine& engine_;
  const MeshGroups& groups_;
  Device& device_;
  Ops& ops_;
  Stream& compute_;
  FederationOptions options_;
  AggregationKind kind_;
  std::vector<Buffer> memory_;
  std::vector<Lane> lanes_;
  std::vector<State> states_;
};

}  // namespace strata
