#include "optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace strata {
namespace {

// Share of the way from peak (0) to floor (1) at time t, when the last `length` steps of the run decay.
double decayed(double t, double total, double length) {
  return length <= 0 ? 0 : std::clamp((t - (total - length)) / length, 0.0, 1.0);
}

}  // namespace

double learning_rate(const ScheduleConfig& schedule, double peak, std::int64_t step) {
  const double t = static_cast<double>(schedule.warmup_from_zero ? step - 1 : step);
  const double warmup = static_cast<double>(schedule.warmup_steps),
               total = static_cast<double>(schedule.steps);
  if (t < warmup) return peak * t / warmup;

  double share = 0;
  if (schedule.kind == "cosine") {
    share = 0.5 * (1 - std::cos(std::numbers::pi * decayed(t, total, total - warmup)));
  } else if (schedule.kind == "linear") {
    share = decayed(t, total, total - warmup);
  } else if (schedule.kind == "wsd") {
    share = decayed(t, total, static_cast<double>(schedule.decay_steps));
  } else if (schedule.kind != "constant") {
    throw UsageError(fmt::format(
        "schedule.kind is \"{}\", allowed are cosine, linear, constant, wsd -> choose one", schedule.kind));
  }
  return share == 1 ? schedule.min_lr : peak + share * (schedule.min_lr - peak);
}

}  // namespace strata
