#pragma once
// A Stream of the CUDA backend: the CUDA stream on which its work is enqueued. Whoever made the handle owns
// it.
#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "backend/device.h"

namespace strata {

class CudaStream final : public Stream {
 public:
  CudaStream(std::string name, cudaStream_t handle) : Stream(std::move(name)), handle_(handle) {}
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_;
};

inline cudaStream_t cuda_stream(Stream& stream) {
  return static_cast<CudaStream&>(stream).handle();
}

}  // namespace strata
