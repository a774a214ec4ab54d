#include "cuda/emulation/runtime.h"

#include "cuda/emulation/memory.h"
#include "cuda/emulation/options.h"

#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace strata::emulation {

namespace {

// The attributes of kernels belong to the device, so all host threads share them.
class KernelAttributes {
 public:
  static KernelAttributes& instance() {
    static KernelAttributes attributes;
    return attributes;
  }
  void set(const void* kernel, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    shared_bytes_[kernel] = bytes;
  }
  const std::size_t* find(const void* kernel) const {
    const std::lock_guard lock(mutex_);
    const auto entry = shared_bytes_.find(kernel);
    return entry == shared_bytes_.end() ? nullptr : &entry->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const void*, std::size_t> shared_bytes_;
};

constinit thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// One side of a copy is as its kind says: inside one device allocation, or outside all of them.
bool side_ok(const void* p, std::size_t bytes, bool device) {
  const DeviceMemory& memory = DeviceMemory::instance();
  if (device) return memory.holds(p, bytes);
  const auto range = memory.find(p);
  return !range || p == range->begin + range->size;  // host memory may begin where a device allocation ends
}

}  // namespace

std::size_t allowed_dynamic_shared(const void* kernel, std::size_t otherwise) {
  const std::size_t* bytes = KernelAttributes::instance().find(kernel);
  return bytes == nullptr ? otherwise : *bytes;
}

bool has_shared_attribute(const void* kernel) {
  return KernelAttributes::instance().find(kernel) != nullptr;
}

}  // namespace strata::emulation

using strata::emulation::DeviceMemory;
using strata::emulation::result;

extern "C" {

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  if (p == nullptr) return result(cudaErrorInvalidValue);
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  try {
    *p = DeviceMemory::instance().allocate(bytes);
  } catch (const std::bad_alloc&) {
    return result(cudaErrorMemoryAllocation);
  }
  if (strata::emulation::current_options().poison) std::memset(*p, strata::emulation::poison_byte, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  return p == nullptr || DeviceMemory::instance().release(p) ? cudaSuccess : result(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return cudaSuccess;
  bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) {
    to_device = DeviceMemory::instance().find(to).has_value();
    from_device = DeviceMemory::instance().find(from).has_value();
  }
  if (!strata::emulation::side_ok(to, bytes, to_device) ||
      !strata::emulation::side_ok(from, bytes, from_device)) {
    return result(cudaErrorInvalidValue);
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemset(void* p, int value, std::size_t bytes) {
  if (bytes == 0) return cudaSuccess;
  if (!DeviceMemory::instance().holds(p, bytes)) return result(cudaErrorInvalidValue);
  std::memset(p, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t) {
  return cudaMemset(p, value, bytes);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  const auto maximum = strata::emulation::current_options().shared_bytes_maximum;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > maximum) {
    return result(cudaErrorInvalidValue);
  }
  strata::emulation::KernelAttributes::instance().set(kernel, static_cast<std::size_t>(value));
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return std::exchange(strata::emulation::last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return strata::emulation::last_error;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    default:
      return "an error the emulation does not produce";
  }
}

}  // extern "C"
