#pragma once
// Phase times of a step from events on the compute stream. Nothing here makes the host wait.
#include <vector>

#include "backend/device.h"
#include "federation/scheduler.h"
#include "train/metrics.h"

namespace strata {

// Events of one step, in the order in which they are recorded.
struct StepEvents {
  Event begin;                   // end of the step before (or of what came between)
  Event data;                    // batch uploaded
  std::vector<Event> forward;    // by micro-step: end of forward
  std::vector<Event> backward;   // by micro-step: end of backward, reductions included after the last
  Event optimizer, aggregation;  // ends
  bool aggregated = false;
};

// All events must be complete.
PhaseSeconds phase_seconds(Device& device, const StepEvents& events);

// Seconds in which at least one of the spans that are complete was running. Drops those from `spans`.
double busy_seconds(Device& device, std::vector<FederationScheduler::BusySpan>& spans);

}  // namespace strata
