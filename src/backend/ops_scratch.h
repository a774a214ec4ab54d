#pragma once
// Scratch of operations: one buffer for each stream, which grows to the largest request. Work on one stream
// runs in order, so it can share the buffer; recorded work keeps the buffer it was given alive.
#include <cstddef>
#include <map>
#include <memory>

#include "backend/device.h"

namespace strata {

using ScratchBuffer = std::shared_ptr<Buffer>;

class Scratch {
 public:
  explicit Scratch(Device& device) : device_(device) {}

  ScratchBuffer at_least(const Stream& stream, std::size_t bytes) {
    ScratchBuffer& buffer = buffers_[&stream];
    if (!buffer || buffer->bytes() < bytes) {
      buffer.reset();  // before allocating, so that both never exist at once
      buffer = std::make_shared<Buffer>(device_.allocate(bytes, Purpose::workspace));
    }
    return buffer;
  }

 private:
  Device& device_;
  std::map<const Stream*, ScratchBuffer> buffers_;
};

}  // namespace strata
