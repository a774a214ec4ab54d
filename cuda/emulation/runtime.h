// The part of the CUDA runtime that kernel tests need, on the host: cudaMalloc, cudaFree, cudaMemcpy(Async),
// cudaMemset(Async), cudaFuncSetAttribute, cudaGetLastError, cudaDeviceSynchronize and cudaStreamSynchronize
// are defined with the toolkit's own declarations (runtime.cpp). Everything completes before it returns.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace strata::emulation {

// What cudaFuncSetAttribute allowed `kernel`, or `otherwise` where it was not called.
std::size_t allowed_dynamic_shared(const void* kernel, std::size_t otherwise);
bool has_shared_attribute(const void* kernel);

}  // namespace strata::emulation
