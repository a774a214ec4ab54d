#include "train/step_timer.h"

#include <algorithm>
#include <utility>

namespace strata {

PhaseSeconds phase_seconds(Device& device, const StepEvents& e) {
  PhaseSeconds out;
  out.data = device.seconds_between(e.begin, e.data);
  Event last = e.data;
  for (std::size_t k = 0; k < e.forward.size(); ++k) {
    out.forward += device.seconds_between(last, e.forward[k]);
    out.backward += device.seconds_between(e.forward[k], e.backward[k]);
    last = e.backward[k];
  }
  out.optimizer = device.seconds_between(last, e.optimizer);
  out.aggregation = device.seconds_between(e.optimizer, e.aggregation);
  out.total = out.data + out.forward + out.backward + out.optimizer + out.aggregation;
  return out;
}

double busy_seconds(Device& device, std::vector<FederationScheduler::BusySpan>& spans) {
  std::vector<std::pair<double, double>> times;  // begin and end, from the first span's begin on
  const Event origin = spans.empty() ? Event() : spans.front().begin;
  std::erase_if(spans, [&](const FederationScheduler::BusySpan& s) {
    if (!device.completed(s.end) || !device.completed(origin)) return false;
    times.emplace_back(device.seconds_between(origin, s.begin), device.seconds_between(origin, s.end));
    return true;
  });
  std::sort(times.begin(), times.end());
  double busy = 0, until = -1e300;
  for (const auto& [begin, end] : times) {
    busy += std::max(0.0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  return busy;
}

}  // namespace strata
