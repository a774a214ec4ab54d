#pragma once
// The learning rate as a function of the step alone: the same in all groups, whatever was aggregated.
#include <cstdint>

#include "config/config.h"

namespace strata {

// Learning rate of optimizer step `step`, counted from 1 to schedule.steps. Linear warm-up reaches `peak` at
// step warmup_steps, and the decay (cosine, linear, or wsd's linear last decay_steps) arrives at min_lr
// exactly at the last step. With warmup_from_zero everything comes one step later, as in the paper's
// artifact: step 1 has lr 0 and the last step has not quite arrived.
double learning_rate(const ScheduleConfig& schedule, double peak, std::int64_t step);

}  // namespace strata
