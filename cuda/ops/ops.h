#pragma once
// The CUDA implementation of Ops: products by cuBLASLt (matrix_product.h), everything else by the kernels of
// cuda/kernels. Streams are CudaStreams.
#include <memory>

#include "backend/ops.h"

namespace strata {

struct CudaOpsOptions {
  int compute_capability_major = 8;  // of the device; decides the size of cuBLASLt's workspace
};

// The device must outlive the result. Calls come from one host thread at a time. Throws InternalError when
// cuBLASLt cannot start.
std::unique_ptr<Ops> make_cuda_ops(Device& device, const CudaOpsOptions& options);

}  // namespace strata
