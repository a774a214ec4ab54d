#pragma once
// CpuOps: checks each call, takes scratch, and enqueues the kernels, cut into tasks by the shape alone.
// Split over ops.cpp (factory, scratch sizes), ops_model.cpp (layers, loss) and ops_update.cpp (optimizer,
// elementwise, federation, initialisation).
#include <algorithm>
#include <cstring>

#include "backend/cpu/ops.h"
#include "backend/cpu/ops_kernels.h"
#include "backend/cpu/ops_workers.h"
#include "backend/ops_check.h"
#include "backend/ops_scratch.h"

namespace strata::cpu {

// Rows of a row kernel in one task.
constexpr std::int64_t kRowGrain = 64;
// Most partial sums of a norm's weight gradient.
constexpr std::int64_t kMaxPartials = 64;

// Scratch of rmsnorm_backward and embedding_backward.
std::size_t norm_scratch_bytes(std::int64_t rows, std::int64_t columns);
std::size_t embedding_scratch_bytes(std::int64_t tokens, std::int64_t columns, int threads);

class CpuOps final : public Ops {
 public:
  CpuOps(CpuDevice& device, const CpuOpsOptions& options)
      : workers_(options.threads), gemm_(options.gemm, workers_), scratch_(device) {}

  std::size_t workspace_bytes(const Workload& workload) const override;

  void linear_forward(Stream&, Matrix y, ConstMatrix x, ConstMatrix w) override;
  void linear_backward_input(Stream&, Matrix dx, ConstMatrix dy, ConstMatrix w, bool accumulate) override;
  void linear_backward_weight(Stream&, Matrix dw, ConstMatrix dy, ConstMatrix x, bool accumulate) override;
  void embedding_forward(Stream&, Matrix out, ConstMatrix table, const std::int32_t* tokens) override;
  void embedding_backward(Stream&, Matrix dtable, ConstMatrix dout, const std::int32_t* tokens,
                          bool accumulate) override;
  void rmsnorm_forward(Stream&, Matrix y, float* rstd, Matrix sum, ConstMatrix x, ConstMatrix residual,
                       ConstFlat weight, float eps) override;
  void rmsnorm_backward(Stream&, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                        ConstMatrix h, ConstFlat weight, const float* rstd, bool accumulate_dweight) override;
  void rope(Stream&, Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine,
            const float* sine, bool inverse) override;
  void attention_forward(Stream&, const AttentionShape&, Matrix out, float* lse, ConstMatrix q, ConstMatrix k,
                         ConstMatrix v) override;
  void attention_backward(Stream&, const AttentionShape&, Matrix dq, Matrix dk, Matrix dv, ConstMatrix dout,
                          ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
                          ConstMatrix v) override;
  void swiglu_forward(Stream&, Matrix out, ConstMatrix gate_up) override;
  void swiglu_backward(Stream&, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up) override;
  void cross_entropy(Stream&, Matrix logits, float* losses, const std::int32_t* targets,
                     bool write_gradient) override;
  void sum(Stream&, double* out, const float* values, std::int64_t count, bool accumulate) override;
  void sum_of_squares(Stream&, double* out, ConstFlat x, bool accumulate) override;
  void clip_scale(Stream&, StepScale* out, const double* sums, float max_norm) override;
  void adamw(Stream&, const AdamWStep&, Flat parameter, Flat compute, ConstFlat gradient, Flat m, Flat v,
             const StepScale* scale) override;
  void sgd(Stream&, float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient,
           const StepScale* scale) override;
  void fill(Stream&, Flat out, float value) override;
  void cast(Stream&, Flat out, ConstFlat in) override;
  void axpby(Stream&, Flat y, float a, ConstFlat x, float b) override;
  void pseudo_gradient(Stream&, Flat delta, ConstFlat theta_old, ConstFlat theta) override;
  void outer_step(Stream&, const OuterStep&, Flat theta, Flat compute, Flat theta_old, Flat momentum,
                  ConstFlat delta) override;
  void quantize_int8(Stream&, std::int8_t* q, float* scales, Flat error, ConstFlat x,
                     std::int64_t block) override;
  void dequantize_int8(Stream&, Flat out, const std::int8_t* q, const float* scales, std::int64_t block,
                       float weight, bool accumulate) override;
  void initialize_normal(Stream&, Flat out, float standard_deviation, RandomKey key,
                         std::int64_t first_element) override;

 private:
  void product(Stream&, const GemmCall& call);
  // Enqueues body(begin, end) over [0, count) in ranges of `grain`.
  template <class F>
  void enqueue_ranges(Stream& stream, std::int64_t count, std::int64_t grain, F body) {
    cpu_stream(stream).run([this, count, grain, body] { run_ranges(count, grain, body); });
  }
  template <class F>
  void run_ranges(std::int64_t count, std::int64_t grain, const F& body) {
    workers_.run((count + grain - 1) / grain,
                 [&](std::int64_t i, int) { body(i * grain, std::min(count, (i + 1) * grain)); });
  }
  // Enqueues *out (+)= the sum over ranges of part(begin, end), in their order.
  template <class F>
  void enqueue_sum(Stream& stream, double* out, std::int64_t count, bool accumulate, F part);

  Workers workers_;
  mutable Gemm gemm_;  // caches primitives
  Scratch scratch_;
};

}  // namespace strata::cpu
