#include "cuda/ops/ops.h"

#include <algorithm>

#include "backend/ops_check.h"
#include "backend/ops_scratch.h"
#include "cuda/kernels/attention.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ops/matrix_product.h"
#include "cuda/stream.h"

namespace strata {
namespace {

// Every operation checks its operands, takes scratch where it needs some, and launches. One scratch buffer
// serves all operations of a stream in turn; growing it frees the old one, for which CUDA waits until the
// stream is done with it.
class CudaOps final : public Ops {
 public:
  CudaOps(Device& device, const CudaOpsOptions& options)
      : products_(gpu::product_workspace_bytes(options.compute_capability_major)), scratch_(device) {}

  std::size_t workspace_bytes(const Workload& w) const override {
    std::size_t most = std::max(products_.workspace_bytes(), gpu::sums_scratch_bytes);
    if (w.compute == DType::f32 && w.gradient == DType::bf16) {
      const std::int64_t widest =
          std::max({w.vocabulary, 2 * w.intermediate,
                    (w.attention.query_heads + 2 * w.attention.key_value_heads) * w.attention.head_size});
      most = std::max(most, products_.workspace_bytes() + product_bytes(widest, w.hidden));
    }
    if (w.attention.head_size > 0) most = std::max(most, gpu::attention_backward_scratch_bytes(w.attention));
    return std::max(most, gpu::rmsnorm_backward_scratch_bytes(w.tokens, w.hidden));
  }

  void linear_forward(Stream& stream, Matrix y, ConstMatrix x, ConstMatrix w) override {
    checks::linear_forward(y, x, w);
    product(stream, {.c = y, .a = x, .b = w, .transpose_b = true});
  }
  void linear_backward_input(Stream& stream, Matrix dx, ConstMatrix dy, ConstMatrix w,
                             bool accumulate) override {
    checks::linear_backward_input(dx, dy, w);
    product(stream, {.c = dx, .a = dy, .b = w, .accumulate = accumulate});
  }
  void linear_backward_weight(Stream& stream, Matrix dw, ConstMatrix dy, ConstMatrix x,
                              bool accumulate) override {
    checks::linear_backward_weight(dw, dy, x);
    product(stream, {.c = dw, .a = dy, .b = x, .transpose_a = true, .accumulate = accumulate});
  }

  void embedding_forward(Stream& stream, Matrix out, ConstMatrix table, const std::int32_t* tokens) override {
    checks::embedding_forward(out, table, tokens);
    gpu::embedding_forward(cuda_stream(stream), out, table, tokens);
  }
  void embedding_backward(Stream& stream, Matrix dtable, ConstMatrix dout, const std::int32_t* tokens,
                          bool accumulate) override {
    checks::embedding_backward(dtable, dout, tokens);
    gpu::embedding_backward(cuda_stream(stream), dtable, dout, tokens, accumulate);
  }

  void rmsnorm_forward(Stream& stream, Matrix y, float* rstd, Matrix sum, ConstMatrix x, ConstMatrix residual,
                       ConstFlat weight, float eps) override {
    checks::rmsnorm_forward(y, rstd, sum, x, residual, weight);
    gpu::rmsnorm_forward(cuda_stream(stream), y, rstd, sum, x, residual, weight, eps);
  }
  void rmsnorm_backward(Stream& stream, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                        ConstMatrix h, ConstFlat weight, const float* rstd,
                        bool accumulate_dweight) override {
    checks::rmsnorm_backward(dx, dweight, dy, dresidual, h, weight, rstd);
    gpu::rmsnorm_backward(cuda_stream(stream), dx, dweight, dy, dresidual, h, weight, rstd,
                          accumulate_dweight,
                          scratch(stream, gpu::rmsnorm_backward_scratch_bytes(h.rows, h.cols)));
  }

  void rope(Stream& stream, Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine,
            const float* sine, bool inverse) override {
    checks::rope(x, head_size, sequence, cosine, sine);
    gpu::rope(cuda_stream(stream), x, head_size, sequence, cosine, sine, inverse);
  }

  void attention_forward(Stream& stream, const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q,
                         ConstMatrix k, ConstMatrix v) override {
    checks::attention_forward(shape, out, lse, q, k, v);
    gpu::attention_forward(cuda_stream(stream), shape, out, lse, q, k, v);
  }
  void attention_backward(Stream& stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
                          ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
                          ConstMatrix v) override {
    checks::attention_backward(shape, dq, dk, dv, dout, out, lse, q, k, v);
    gpu::attention_backward(
        cuda_stream(stream), shape, dq, dk, dv, dout, out, lse, q, k, v,
        static_cast<float*>(scratch(stream, gpu::attention_backward_scratch_bytes(shape))));
  }

  void swiglu_forward(Stream& stream, Matrix out, ConstMatrix gate_up) override {
    checks::swiglu_forward(out, gate_up);
    gpu::swiglu_forward(cuda_stream(stream), out, gate_up);
  }
  void swiglu_backward(Stream& stream, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up) override {
    checks::swiglu_backward(dgate_up, dout, gate_up);
    gpu::swiglu_backward(cuda_stream(stream), dgate_up, dout, gate_up);
  }

  void cross_entropy(Stream& stream, Matrix logits, float* losses, const std::int32_t* targets,
                     bool write_gradient) override {
    checks::cross_entropy(logits, losses, targets);
    gpu::cross_entropy(cuda_stream(stream), logits, losses, targets, write_gradient);
  }

  void sum(Stream& stream, double* out, const float* values, std::int64_t count, bool accumulate) override {
    checks::sum(out, values, count);
    gpu::sum(cuda_stream(stream), out, values, count, accumulate, scratch(stream, gpu::sums_scratch_bytes));
  }
  void sum_of_squares(Stream& stream, double* out, ConstFlat x, bool accumulate) override {
    checks::sum_of_squares(out, x);
    gpu::sum_of_squares(cuda_stream(stream), out, x, accumulate, scratch(stream, gpu::sums_scratch_bytes));
  }
  void clip_scale(Stream& stream, StepScale* out, const double* sums, float max_norm) override {
    checks::clip_scale(out, sums);
    gpu::clip_scale(cuda_stream(stream), out, sums, max_norm);
  }

  void adamw(Stream& stream, const AdamWStep& step, Flat parameter, Flat compute, ConstFlat gradient, Flat m,
             Flat v, const StepScale* scale) override {
    checks::adamw(step, parameter, compute, gradient, m, v, scale);
    gpu::adamw(cuda_stream(stream), step, parameter, compute, gradient, m, v, scale);
  }
  void sgd(Stream& stream, float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient,
           const StepScale* scale) override {
    checks::sgd(parameter, compute, gradient, scale);
    gpu::sgd(cuda_stream(stream), lr, weight_decay, parameter, compute, gradient, scale);
  }

  void fill(Stream& stream, Flat out, float value) override {
    checks::fill(out);
    gpu::fill(cuda_stream(stream), out, value);
  }
  void cast(Stream& stream, Flat out, ConstFlat in) override {
    checks::cast(out, in);
    gpu::cast(cuda_stream(stream), out, in);
  }
  void axpby(Stream& stream, Flat y, float a, ConstFlat x, float b) override {
    checks::axpby(y, x);
    gpu::axpby(cuda_stream(stream), y, a, x, b);
  }

  void pseudo_gradient(Stream& stream, Flat delta, ConstFlat theta_old, ConstFlat theta) override {
    checks::pseudo_gradient(delta, theta_old, theta);
    gpu::pseudo_gradient(cuda_stream(stream), delta, theta_old, theta);
  }
  void outer_step(Stream& stream, const OuterStep& step, Flat theta, Flat compute, Flat theta_old,
                  Flat momentum, ConstFlat delta) override {
    checks::outer_step(step, theta, compute, theta_old, momentum, delta);
    gpu::outer_step(cuda_stream(stream), step, theta, compute, theta_old, momentum, delta);
  }
  void quantize_int8(Stream& stream, std::int8_t* q, float* scales, Flat error, ConstFlat x,
                     std::int64_t block) override {
    checks::quantize_int8(q, scales, error, x, block);
    gpu::quantize_int8(cuda_stream(stream), q, scales, error, x, block);
  }
  void dequantize_int8(Stream& stream, Flat out, const std::int8_t* q, const float* scales,
                       std::int64_t block, float weight, bool accumulate) override {
    checks::dequantize_int8(out, q, scales, block);
    gpu::dequantize_int8(cuda_stream(stream), out, q, scales, block, weight, accumulate);
  }
  void initialize_normal(Stream& stream, Flat out, float standard_deviation, RandomKey key,
                         std::int64_t first_element) override {
    checks::initialize_normal(out, first_element);
    gpu::initialize_normal(cuda_stream(stream), out, standard_deviation, key, first_element);
  }

 private:
  // Recorded launches need no shared ownership: see the comment of the class.
  void* scratch(Stream& stream, std::size_t bytes) { return scratch_.at_least(stream, bytes)->data(); }

  static std::size_t product_bytes(std::int64_t rows, std::int64_t columns) {
    return static_cast<std::size_t>(rows * columns) * sizeof(float);
  }

  void product(Stream& stream, const gpu::Product& p) {
    if (p.c.rows == 0 || p.c.cols == 0) return;
    const std::size_t workspace = products_.workspace_bytes();
    if (p.a.dtype == DType::f32 && p.c.dtype == DType::bf16) {
      // cuBLASLt does not round fp32 products to bf16: the product goes to scratch, then is added and rounded
      // once.
      if (p.c.stride != p.c.cols)
        Check("matrix product").fail("a bf16 result of fp32 operands has gaps between its rows");
      auto* const memory = static_cast<char*>(scratch(stream, workspace + product_bytes(p.c.rows, p.c.cols)));
      const Matrix exact = matrix(memory + workspace, DType::f32, p.c.rows, p.c.cols);
      gpu::Product into_scratch = p;
      into_scratch.c = exact;
      into_scratch.accumulate = false;
      products_.run(cuda_stream(stream), into_scratch, memory);
      const std::int64_t count = p.c.rows * p.c.cols;
      gpu::axpby(cuda_stream(stream), {p.c.data, p.c.dtype, count}, 1.0f, {exact.data, exact.dtype, count},
                 p.accumulate ? 1.0f : 0.0f);
      return;
    }
    products_.run(cuda_stream(stream), p, scratch(stream, workspace));
  }

  gpu::MatrixProducts products_;
  Scratch scratch_;
};

}  // namespace

std::unique_ptr<Ops> make_cuda_ops(Device& device, const CudaOpsOptions& options) {
  return std::make_unique<CudaOps>(device, options);
}

}  // namespace strata
