#pragma once
// The CPU's kernels as plain functions on a range of rows or elements, one call per task of Workers. Each
// runs the best instruction set present. Row kernels take the whole operands and the range [begin, end) to
// do.
//
// Bits: random numbers, optimizer, elementwise, federation and sum kernels use only operations that IEEE 754
// rounds correctly, in an order that does not depend on the vector width: the same bits on every machine.
// Norms, softmax, SwiGLU, attention and products use fused multiply-add where the CPU has it and sum in
// as many lanes as a vector has, so they may differ in the last bits between machines, never between runs.
// bf16 attention on a CPU with bf16 dot products rounds probabilities and score gradients to bf16 as well.
#include <cstdint>

#include "backend/ops.h"

namespace strata::cpu::kernels {

// ---- rows
void rmsnorm_forward(Matrix y, float* rstd, Matrix sum, ConstMatrix x, ConstMatrix residual, ConstFlat weight,
                     float eps, std::int64_t begin, std::int64_t end);
// dweight_sum (C) fp32 receives the sum over these rows of dy * h * rstd; null when not wanted.
void rmsnorm_backward(Matrix dx, float* dweight_sum, ConstMatrix dy, ConstMatrix dresidual, ConstMatrix h,
                      ConstFlat weight, const float* rstd, std::int64_t begin, std::int64_t end);
// out (+)= the sum of `count` rows of partial (count, out.count), in order.
void sum_rows(Flat out, const float* partial, std::int64_t count, bool accumulate);
void rope(Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine, const float* sine,
          bool inverse, std::int64_t begin, std::int64_t end);
void swiglu_forward(Matrix out, ConstMatrix gate_up, std::int64_t begin, std::int64_t end);
void swiglu_backward(Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up, std::int64_t begin,
                     std::int64_t end);
void cross_entropy(Matrix logits, float* losses, const std::int32_t* targets, bool write_gradient,
                   std::int64_t begin, std::int64_t end);
// to (cols) = or += the sum of rows index[0], index[1], ... of `from`, added in fp32 and rounded once.
void gather_sum(void* to, DType to_dtype, ConstMatrix from, const std::int64_t* rows, std::int64_t count,
                bool accumulate, float* row_scratch);

// ---- attention, all query heads of one (batch, key/value head) pair
std::size_t attention_forward_scratch_floats(const AttentionShape& shape, DType type);
std::size_t attention_backward_scratch_floats(const AttentionShape& shape, DType type);
void attention_forward(const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q, ConstMatrix k,
                       ConstMatrix v, std::int64_t batch, std::int64_t key_value_head, float* scratch);
void attention_backward(const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv, ConstMatrix dout,
                        ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k, ConstMatrix v,
                        std::int64_t batch, std::int64_t key_value_head, float* scratch);

// ---- flat buffers: elements [begin, end); begin a multiple of kGrain
constexpr std::int64_t kGrain = 1 << 16;
double sum_range(const float* values, std::int64_t begin, std::int64_t end);
double sum_of_squares_range(ConstFlat x, std::int64_t begin, std::int64_t end);
void adamw(const AdamWStep& step, Flat parameter, Flat compute, ConstFlat gradient, Flat m, Flat v,
           float gradient_scale, std::int64_t begin, std::int64_t end);
void sgd(float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient, float gradient_scale,
         std::int64_t begin, std::int64_t end);
void fill(Flat out, float value, std::int64_t begin, std::int64_t end);
void cast(Flat out, ConstFlat in, std::int64_t begin, std::int64_t end);
void axpby(Flat y, float a, ConstFlat x, float b, std::int64_t begin, std::int64_t end);
void pseudo_gradient(Flat delta, ConstFlat theta_old, ConstFlat theta, std::int64_t begin, std::int64_t end);
void outer_step(const OuterStep& step, Flat theta, Flat compute, Flat theta_old, Flat momentum,
                ConstFlat delta, std::int64_t begin, std::int64_t end);
void initialize_normal(Flat out, float standard_deviation, RandomKey key, std::int64_t first_element,
                       std::int64_t begin, std::int64_t end);
// One block of int8 with its scale: elements [begin, end).
void quantize_block(std::int8_t* q, float* scale, Flat error, ConstFlat x, std::int64_t begin,
                    std::int64_t end);
void dequantize_block(Flat out, const std::int8_t* q, float scale, float weight, bool accumulate,
                      std::int64_t begin, std::int64_t end);

}  // namespace strata::cpu::kernels
