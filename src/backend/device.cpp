#include "backend/device.h"

namespace strata {

const char* name_of(Purpose purpose) {
  switch (purpose) {
    case Purpose::weights:
      return "weights";
    case Purpose::gradients:
      return "gradients";
    case Purpose::moments:
      return "moments";
    case Purpose::outer:
      return "outer state";
    case Purpose::activations:
      return "activations";
    case Purpose::workspace:
      return "workspace";
    case Purpose::data:
      return "data";
    case Purpose::count_:
      break;
  }
  return "?";
}

Buffer::~Buffer() {
  if (data_ != nullptr) device_->release(data_, bytes_, purpose_, host_);
}

}  // namespace strata
