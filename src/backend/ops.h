#pragma once
// Ops: the operations of a Llama-class decoder and of its optimizer, enqueued on a stream.
//
// Conventions. N = B*T tokens, C hidden size, V vocabulary, F intermediate size, D head size. Compute tensors
// are fp32 or bf16 (one dtype within a call unless said otherwise) with fp32 arithmetic inside. Weight
// gradients may be fp32 or bf16 whatever the compute dtype. `accumulate` adds to what is there instead of
// overwriting it. Every result is deterministic: the same input gives the same bits, whatever the number of
// threads. Shape or dtype mismatches throw InternalError at the call, before anything is enqueued. No
// operation allocates device memory after its first call with a given shape; scratch has Purpose::workspace.
#include <cstdint>

#include "backend/device.h"
#include "backend/random_key.h"
#include "backend/tensor.h"

namespace strata {

struct AttentionShape {
  std::int64_t batch = 0, sequence = 0;  // B, T
  std::int64_t query_heads = 0, key_value_heads = 0, head_size = 0;
};

// Sizes that decide how much scratch an implementation needs.
struct Workload {
  std::int64_t tokens = 0;  // N
  std::int64_t hidden = 0, intermediate = 0, vocabulary = 0, loss_chunk_tokens = 0;
  AttentionShape attention;
  DType compute = DType::f32;
  DType gradient = DType::f32;
};

struct AdamWStep {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  std::int64_t step = 1;             // counted from 1; bias corrections are computed from it in fp64
  bool stochastic_rounding = false;  // bf16 parameters only
  RandomKey key;                     // for stochastic rounding: purpose and parameter name
  std::int64_t first_element =
      0;  // index of the first element within its parameter, so no mesh changes the draw
};

// Lives in device memory; written by clip_scale, read by the optimizer kernels.
struct StepScale {
  float gradient_scale = 0;  // multiplies the summed gradient: clip / tokens
  float norm = 0;            // norm of the mean gradient, before clipping
  std::int32_t finite = 0;   // 0: the optimizer kernels leave everything untouched
};

enum class OuterRule : std::uint8_t { fedavg, fedavgm, fedmom, diloco };
struct OuterStep {
  OuterRule rule = OuterRule::fedavg;
  float eta = 1, momentum = 0;  // momentum: beta of fedavgm, mu of fedmom and diloco
  float alpha = 0;              // streaming: local = alpha * local + (1 - alpha) * new global
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Bytes of scratch this implementation will have allocated once it has run a training step of this
  // workload.
  virtual std::size_t workspace_bytes(const Workload& workload) const = 0;

  // ---- linear layers, w (O, I) as Hugging Face stores it
  // ------------------------------------------------------- y (N, O) = x (N, I) w^T
  virtual void linear_forward(Stream&, Matrix y, ConstMatrix x, ConstMatrix w) = 0;
  // dx (N, I) (+)= dy (N, O) w
  virtual void linear_backward_input(Stream&, Matrix dx, ConstMatrix dy, ConstMatrix w, bool accumulate) = 0;
  // dw (O, I) (+)= dy^T x; dw fp32 or bf16
  virtual void linear_backward_weight(Stream&, Matrix dw, ConstMatrix dy, ConstMatrix x, bool accumulate) = 0;

  // ---- embedding: tokens (N) int32 in device memory, every id in [0, V)
  // ----------------------------------------
  virtual void embedding_forward(Stream&, Matrix out /*(N, C)*/, ConstMatrix table /*(V, C)*/,
                                 const std::int32_t* tokens) = 0;
  // Adds rows of dout into dtable (V, C) in token order; without accumulate, dtable is zeroed first.
  virtual void embedding_backward(Stream&, Matrix dtable, ConstMatrix dout /*(N, C)*/,
                                  const std::int32_t* tokens, bool accumulate) = 0;

  // ---- RMSNorm with the residual add fused
  // ---------------------------------------------------------------------- h = x + residual (h = x when
  // residual is empty), rounded to the compute dtype; sum (N, C) receives h when given (it may alias x or
  // residual); y = h * rstd * weight, rstd (N) fp32 = 1 / sqrt(mean(h^2) + eps).
  virtual void rmsnorm_forward(Stream&, Matrix y, float* rstd, Matrix sum, ConstMatrix x,
                               ConstMatrix residual, ConstFlat weight, float eps) = 0;
  // dx (N, C) = dresidual (when given) + gradient through the norm; h is the normalised input of the forward.
  // dx may alias dy or dresidual. dweight (C) fp32 or bf16.
  virtual void rmsnorm_backward(Stream&, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                                ConstMatrix h, ConstFlat weight, const float* rstd,
                                bool accumulate_dweight) = 0;

  // ---- rotary position embedding, Hugging Face convention (halves of a head rotate together)
  // --------------------- In place on `heads` consecutive heads of every row of x (N, heads*D); position of
  // row n is n mod sequence. cosine, sine: (sequence, D/2) fp32 in device memory. inverse: the transpose, for
  // backward.
  virtual void rope(Stream&, Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine,
                    const float* sine, bool inverse) = 0;

  // ---- causal attention, scale 1/sqrt(D), grouped queries: query head h reads key/value head h / (Hq/Hkv)
  // -------- q, out (N, Hq*D), k, v (N, Hkv*D), rows of any stride; lse (B, Hq, T) fp32, natural log.
  virtual void attention_forward(Stream&, const AttentionShape&, Matrix out, float* lse, ConstMatrix q,
                                 ConstMatrix k, ConstMatrix v) = 0;
  virtual void attention_backward(Stream&, const AttentionShape&, Matrix dq, Matrix dk, Matrix dv,
                                  ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q,
                                  ConstMatrix k, ConstMatrix v) = 0;

  // ---- SwiGLU: gate_up (N, 2F) holds gate in its first F columns, up in the rest
  // ---------------------------------
  virtual void swiglu_forward(Stream&, Matrix out /*(N, F)*/, ConstMatrix gate_up) = 0;
  virtual void swiglu_backward(Stream&, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up) = 0;

  // ---- loss
  // -------------------------------------------------------------------------------------------------------
  // losses (rows) fp32 = logsumexp(logits) - logits[target]; target < 0 is masked: loss 0, gradient 0. With
  // write_gradient, logits (rows, V) are overwritten by d(sum of losses)/d(logits), unscaled.
  virtual void cross_entropy(Stream&, Matrix logits, float* losses, const std::int32_t* targets,
                             bool write_gradient) = 0;

  // ---- reductions to one fp64 number in device memory, in a fixed order
  // -------------------------------------------
  virtual void sum(Stream&, double* out, const float* values, std::int64_t count, bool accumulate) = 0;
  virtual void sum_of_squares(Stream&, double* out, ConstFlat x, bool accumulate) = 0;

  // ---- optimizer on flat shards
  // ------------------------------------------------------------------------------------ sums: {sum of
  // squares of the summed gradient, target tokens} fp64 in device memory. norm = sqrt(sums[0]) / tokens;
  // gradient_scale = (norm > max_norm > 0 ? max_norm / norm : 1) / tokens. max_norm 0: no clipping.
  virtual void clip_scale(Stream&, StepScale* out, const double* sums, float max_norm) = 0;
  // parameter, m, v: fp32, or all bf16. compute: empty, or a bf16 copy of the parameter to refresh. gradient
  // fp32/bf16.
  virtual void adamw(Stream&, const AdamWStep&, Flat parameter, Flat compute, ConstFlat gradient, Flat m,
                     Flat v, const StepScale* scale) = 0;
  virtual void sgd(Stream&, float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient,
                   const StepScale* scale) = 0;

  // ---- elementwise on flat buffers; dtypes may differ between arguments, arithmetic is fp32
  // --------------------------
  virtual void fill(Stream&, Flat out, float value) = 0;
  virtual void cast(Stream&, Flat out, ConstFlat in) = 0;
  virtual void axpby(Stream&, Flat y, float a, ConstFlat x,
                     float b) = 0;  // y = a x + b y (b == 0: y is not read)

  // ---- federation
  // ----------------------------------------------------------------------------------------------------
  // delta = theta_old - theta (all flat, fp32 arithmetic)
  virtual void pseudo_gradient(Stream&, Flat delta, ConstFlat theta_old, ConstFlat theta) = 0;
  // Applies reference rules to the averaged pseudo-gradient: updates theta_old to the new global value,
  // momentum in place (fp32; empty for fedavg; v_prev for fedmom), theta to alpha*theta + (1-alpha)*new, and
  // compute (bf16 copy of theta) when given.
  virtual void outer_step(Stream&, const OuterStep&, Flat theta, Flat compute, Flat theta_old, Flat momentum,
                          ConstFlat delta) = 0;
  // int8 with one fp32 scale (largest magnitude / 127) a block of `block` elements, and error feedback:
  // x += error; q = round(x / scale); error = x - q * scale. error fp32 may be empty.
  virtual void quantize_int8(Stream&, std::int8_t* q, float* scales, Flat error, ConstFlat x,
                             std::int64_t block) = 0;
  // out (+)= weight * q * scale
  virtual void dequantize_int8(Stream&, Flat out, const std::int8_t* q, const float* scales,
                               std::int64_t block, float weight, bool accumulate) = 0;

  // ---- initialisation
  // ------------------------------------------------------------------------------------------------ out[i] =
  // std * normal(key, first_element + i): see backend/random.h. The same bits on every backend and mesh.
  virtual void initialize_normal(Stream&, Flat out, float standard_deviation, RandomKey key,
                                 std::int64_t first_element) = 0;
};

}  // namespace strata
