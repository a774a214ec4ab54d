#pragma once
// Launchers of the kernels, one .cu file an operation: they enqueue on `stream` and return. backend/ops.h
// says what each computes, with shapes and dtypes; callers (cuda/ops) have checked those. Attention has a
// header of its own.
//
// Where the CPU throws on data that only the device sees (a token id or a target outside the vocabulary), a
// kernel answers with NaN, which the next loss and gradient norm report.
#include <cuda_runtime.h>

#include <cstdint>

#include "backend/ops.h"

namespace strata::gpu {

// ---- rmsnorm.cu ----
void rmsnorm_forward(cudaStream_t stream, Matrix y, float* rstd, Matrix sum, ConstMatrix x,
                     ConstMatrix residual, ConstFlat weight, float eps);
// scratch: rmsnorm_backward_scratch_bytes
std::size_t rmsnorm_backward_scratch_bytes(std::int64_t rows, std::int64_t columns);
void rmsnorm_backward(cudaStream_t stream, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                      ConstMatrix h, ConstFlat weight, const float* rstd, bool accumulate_dweight,
                      void* scratch);

// ---- embedding.cu ----
void embedding_forward(cudaStream_t stream, Matrix out, ConstMatrix table, const std::int32_t* tokens);
void embedding_backward(cudaStream_t stream, Matrix dtable, ConstMatrix dout, const std::int32_t* tokens,
                        bool accumulate);

// ---- rope.cu ----
void rope(cudaStream_t stream, Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine,
          const float* sine, bool inverse);

// ---- swiglu.cu ----
void swiglu_forward(cudaStream_t stream, Matrix out, ConstMatrix gate_up);
void swiglu_backward(cudaStream_t stream, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up);

// ---- cross_entropy.cu ----
void cross_entropy(cudaStream_t stream, Matrix logits, float* losses, const std::int32_t* targets,
                   bool write_gradient);

// ---- sums.cu ---- scratch: sums_scratch_bytes for either sum
constexpr std::size_t sums_scratch_bytes = 1024 * sizeof(double);
void sum(cudaStream_t stream, double* out, const float* values, std::int64_t count, bool accumulate,
         void* scratch);
void sum_of_squares(cudaStream_t stream, double* out, ConstFlat x, bool accumulate, void* scratch);
void clip_scale(cudaStream_t stream, StepScale* out, const double* sums, float max_norm);

// ---- optimizer.cu ----
void adamw(cudaStream_t stream, const AdamWStep& step, Flat parameter, Flat compute, ConstFlat gradient,
           Flat m, Flat v, const StepScale* scale);
void sgd(cudaStream_t stream, float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient,
         const StepScale* scale);

// ---- elementwise.cu ----
void fill(cudaStream_t stream, Flat out, float value);
void cast(cudaStream_t stream, Flat out, ConstFlat in);
void axpby(cudaStream_t stream, Flat y, float a, ConstFlat x, float b);

// ---- federation.cu ----
void pseudo_gradient(cudaStream_t stream, Flat delta, ConstFlat theta_old, ConstFlat theta);
void outer_step(cudaStream_t stream, const OuterStep& step, Flat theta, Flat compute, Flat theta_old,
                Flat momentum, ConstFlat delta);

// ---- int8.cu ----
void quantize_int8(cudaStream_t stream, std::int8_t* q, float* scales, Flat error, ConstFlat x,
                   std::int64_t block);
void dequantize_int8(cudaStream_t stream, Flat out, const std::int8_t* q, const float* scales,
                     std::int64_t block, float weight, bool accumulate);

// ---- initialize.cu ----
void initialize_normal(cudaStream_t stream, Flat out, float standard_deviation, RandomKey key,
                       std::int64_t first_element);

}  // namespace strata::gpu
