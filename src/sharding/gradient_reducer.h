#pragma once
// The gradients' half of the engine: full-size slots to write to, reductions, and the shards' sums.
#include <vector>

#include "sharding/engine_parts.h"
#include "sharding/slots.h"

namespace strata {

class GradientReducer {
 public:
  explicit GradientReducer(EngineParts parts);

  void begin_step(std::int64_t step);
  void begin_micro_step(int k);  // k > 0: throws InternalError when micro-step k-1 left a gradient out

  struct Target {
    Flat data;
    bool accumulate = false;
  };
  // Throws InternalError when the unit has had its gradient in this micro-step (the root may come twice).
  Target acquire(int unit);
  // The compute stream has been given the last write; starts the reduction when the gradient is whole.
  void release(int unit);
  // Compute stream: all gradient shards are the group's sums. Throws InternalError naming a unit that has
  // none.
  void finish();

 private:
  enum class State : std::uint8_t { untouched, leased, partial, whole };

  void require_whole() const;
  bool last_micro_step() const { return micro_step_ + 1 == parts_.options.micro_steps; }
  bool whole_after_release(int unit) const;
  void reduce(int unit);
  Event reduce_scatter(int unit, const Event& written);
  void reduce_over_replicas();
  Slot& slot(int unit);

  EngineParts parts_;
  Stream& reduce_;
  Stream& replicate_;
  SlotRing ring_;
  std::vector<Slot*> slot_of_;  // by unit
  Buffer reduced_, wire_, replica_wire_;

  std::int64_t step_ = 0;
  int micro_step_ = 0;
  std::vector<State> state_;  // by unit, in this micro-step
  std::vector<Event> done_;   // by unit: its shard is the group's sum
  int replica_due_ = -1;      // unit whose shard waits for its all-reduce
};

}  // namespace strata
