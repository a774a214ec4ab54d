#pragma once
// The weights' half of the engine: what is gathered, when, into which slot, and how long it stays.
#include <functional>
#include <vector>

#include "sharding/engine_parts.h"
#include "sharding/slots.h"

namespace strata {

class WeightGatherer {
 public:
  using Pass = ParameterSource::Pass;

  explicit WeightGatherer(EngineParts parts);

  enum class Kind { training, evaluation };
  // Starts a pass over the units: takes back all slots and starts the first gathers.
  void begin_pass(Kind kind, std::int64_t step);

  // The unit's full weights, ordered on the compute stream. Throws InternalError when the unit is not the
  // next of the pass, or no slot is free because leases were not released.
  Flat acquire(int unit, Pass pass);
  // The compute stream has been given its last use of this visit.
  void release(int unit, Pass pass);

  // The stream gathers run on, for whole-unit reads by the engine.
  Stream& stream() { return stream_; }

  std::function<void(int unit)> before_gather;

 private:
  struct Visit {
    int unit = 0;
    Pass pass = Pass::forward;
  };
  void plan_visits();
  void gather_up_to(std::ptrdiff_t last);
  void gather(Slot& slot, int unit);
  bool keeps(int unit, Pass pass) const;
  [[noreturn]] void refuse_order(int unit, Pass pass) const;

  EngineParts parts_;
  Stream& stream_;
  SlotRing ring_;
  std::vector<Slot*> slot_of_;  // by unit; nullptr: not gathered
  std::vector<bool> kept_;      // by unit: gathered and used before in this pass

  Kind kind_ = Kind::training;
  std::int64_t step_ = 0;
  std::vector<Visit> visits_;     // those of the pass that need a gather
  std::ptrdiff_t position_ = -1;  // the last visit that was acquired
  std::ptrdiff_t next_ = 0;       // the first visit whose gather has not been enqueued
};

}  // namespace strata
