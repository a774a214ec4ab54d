#pragma once
// FederationScheduler: after an optimizer step it decides which units aggregate over the federation groups,
// and enqueues them on streams of its own. A unit's next gather waits for its event.
//
//   blocking   all units at once, and the compute stream waits for them.
//   overlap    the same arithmetic; a unit is enqueued just before its next gather and hides behind the
//              forward pass of the units before it. (Collectives start in the order in which they are
//              enqueued, so enqueuing all at once would hold back the first gather.)
//   streaming  units form fragments; each is sent at its own step of every `every` and applied tau steps
//              later.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/ops.h"
#include "federation/options.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"

namespace strata {

// A piece of training state for checkpoints: fp32, shard-sized.
struct NamedState {
  std::string name;  // "outer.decoder.3.theta_old"
  int unit = 0;
  Flat data;
  bool host = false;  // lies in host memory (federation.offload)
};

class FederationScheduler {
 public:
  FederationScheduler(ShardingEngine& engine, const MeshGroups& groups, Device& device, Ops& ops,
                      Stream& compute, const FederationOptions& options);
  ~FederationScheduler();
  FederationScheduler(const FederationScheduler&) = delete;
  FederationScheduler& operator=(const FederationScheduler&) = delete;

  // Outer state from the present parameters: once they are initialised or imported, equal in all groups.
  void initialize();
  // Continues after step `step` of a checkpoint: state() then lists what is to be restored. `in_flight` tells
  // whether the checkpoint holds a unit's delta (a run that ended at `step` has none); by default all do that
  // the schedule has in flight.
  void resume(std::int64_t step, const std::function<bool(int unit)>& in_flight = {});

  // Target tokens of this rank in `step`; call once a step, as soon as they are known on the host, on all
  // ranks. When the step aggregates by token weights, the counts are exchanged behind the backward pass.
  void count_tokens(std::int64_t step, std::int64_t tokens);

  // After the optimizer's step has been enqueued. Returns true when units were aggregated, sent or applied.
  bool after_step(std::int64_t step);
  // Enqueues what overlap still holds back and makes the compute stream wait for all aggregation in progress:
  // before saving, exporting, or the end. Streaming fragments in flight stay in flight.
  void finish();

  // True when all groups hold the same model after `step`.
  bool aggregates(std::int64_t step) const;

  const FederationOptions& options() const;
  // Valid on the compute stream after finish().
  std::vector<NamedState> state() const;
  // Token counts since each fragment's last aggregation on this rank.
  std::vector<std::int64_t> host_state() const;
  void set_host_state(const std::vector<std::int64_t>& counts);

  // Spans of aggregation work since the last call (take them every step), for the phase `aggregation_busy`:
  // read their lengths once they are complete. With `overlap` they are enqueued during the following forward
  // pass.
  struct BusySpan {
    Event begin, end;
  };
  std::vector<BusySpan> take_busy_spans();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
