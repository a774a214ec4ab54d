// Shared memory of the running block: exact-size buffers that are poisoned before each block.
#include "cuda/emulation/executor.h"

#include "cuda/emulation/runtime.h"

#include <cstring>

namespace strata::emulation {

void* Executor::static_shared(const void* key, std::size_t bytes, const char* name, Where where) {
  for (const SharedBuffer& buffer : shared_) {
    if (buffer.key == key) return buffer.begin;
  }
  // No attribute raises the limit of arrays of fixed size, and dynamic memory asked for without one shares
  // that limit.
  std::size_t fixed = bytes;
  for (const SharedBuffer& buffer : shared_) {
    if (buffer.key != nullptr) fixed += buffer.bytes;
  }
  const std::size_t dynamic = launch_->dynamic_shared_bytes;
  const std::size_t limit = options_.shared_bytes_without_attribute;
  const auto refuse = [&](const std::string& limit_text) {
    fail("shared memory of " + std::string(launch_->name) + ": " + std::to_string(fixed) +
         " bytes of fixed size (with `" + name + "` at " + format_where(where) + ") and " +
         std::to_string(dynamic) + " dynamic -> " + limit_text);
  };
  if (fixed > limit) {
    refuse("arrays of fixed size may take " + std::to_string(limit) + " bytes: make them dynamic");
  }
  if (dynamic <= limit && fixed + dynamic > limit && !has_shared_attribute(launch_->kernel)) {
    refuse("more than " + std::to_string(limit) + " bytes need gpu::allow_shared_bytes(kernel, bytes) first");
  }
  if (fixed + dynamic > options_.shared_bytes_maximum) {
    refuse("a block may have " + std::to_string(options_.shared_bytes_maximum) + " bytes");
  }
  auto* p = static_cast<char*>(allocate_exact(bytes, true));
  if (options_.poison) std::memset(p, poison_byte, bytes);
  shared_.push_back({key, name, p, bytes});
  return p;
}

void* Executor::dynamic_shared(Where where) {
  if (launch_->dynamic_shared_bytes == 0) {
    fail("DYN_SMEM at " + format_where(where) + " in a launch with 0 bytes of dynamic shared memory");
  }
  return shared_.front().begin;
}

void Executor::poison_shared() {
  if (!options_.poison) return;
  for (const SharedBuffer& buffer : shared_) std::memset(buffer.begin, poison_byte, buffer.bytes);
}

void Executor::release_shared() {
  for (const SharedBuffer& buffer : shared_) release_exact(buffer.begin);
  shared_.clear();
}

const Executor::SharedBuffer* Executor::shared_holding(const void* p, std::size_t bytes) const {
  const auto* c = static_cast<const char*>(p);
  for (const SharedBuffer& buffer : shared_) {
    if (c >= buffer.begin && c + bytes <= buffer.begin + buffer.bytes) return &buffer;
  }
  return nullptr;
}

void* static_shared(const void* key, std::size_t bytes, const char* name, Where where) {
  return in_kernel("SHARED").static_shared(key, bytes, name, where);
}

void* dynamic_shared(Where where) {
  return in_kernel("DYN_SMEM").dynamic_shared(where);
}

}  // namespace strata::emulation
