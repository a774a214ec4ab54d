#include "train/step_timer.h"

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

}  // namespace strata
