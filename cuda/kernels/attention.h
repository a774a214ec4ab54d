// Causal attention with grouped queries on a GPU, forward and backward: launchers.
//
// The contract is that of Ops::attention_forward and attention_backward (backend/ops.h): scale 1/sqrt(D),
// query head h reads key/value head h / (Hq/Hkv), token t sees tokens 0..t of its sequence; with N = B*T
//   q, out, dq, dout (N, Hq*D)   k, v, dk, dv (N, Hkv*D), rows of any stride   lse (B, Hq, T) fp32, natural
// All matrices of a call have one dtype. Softmax and sums are fp32. Results do not depend on timing.
//
// Two implementations, chosen by the arguments alone:
//   flash  bf16, head size 32, 64, 80, 96, 128 or 256, every row 16-byte aligned (data 16-byte aligned, the
//          stride a multiple of 8): tensor cores, attention_forward.cu and attention_backward.cu
//   plain  fp32, or any other even head size up to 256: CUDA cores, no tiling, attention_plain.cu. Correct,
//          deterministic and slow: it serves the fp32 yardstick and toy models, not training runs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <initializer_list>

#include "backend/ops.h"

namespace strata::gpu {

// Whether a call with these arguments is served by the flash kernels. Ask with every matrix of the call.
bool attention_is_flash(const AttentionShape& shape, std::initializer_list<ConstMatrix> matrices);

// Launches on `stream`. Throws InternalError where a shape, stride or dtype does not fit the contract, or
// where CUDA refuses the launch.
void attention_forward(cudaStream_t stream, const AttentionShape& shape, Matrix out, float* lse,
                       ConstMatrix q, ConstMatrix k, ConstMatrix v);

// As above; scratch: attention_backward_scratch_bytes(shape) of device memory, 4-byte aligned.
std::size_t attention_backward_scratch_bytes(const AttentionShape& shape);
void attention_backward(cudaStream_t stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
                        ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
                        ConstMatrix v, void* scratch);

}  // namespace strata::gpu
