#pragma once
// Every result of a CUDA call goes through STRATA_CUDA: anything but success throws InternalError with the
// call, its place and the runtime's own words.
#include <cuda_runtime.h>

#include <string>

#include "base/error.h"

namespace strata::gpu {

inline void check(cudaError_t result, const char* call, const char* file, int line) {
  if (result == cudaSuccess) return;
  throw InternalError(std::string(call) + ": " + cudaGetErrorString(result) + " (" + file + ":" +
                      std::to_string(line) + ") -> see the device's log (nvidia-smi -q, dmesg)");
}

}  // namespace strata::gpu

#define STRATA_CUDA(call) ::strata::gpu::check((call), #call, __FILE__, __LINE__)
