#pragma once
// Checks of the operands of the operations of ops.h, made at the call by every backend. Each throws
// InternalError with the operation, the operand, what it is and what it should be.
#include <cstdint>
#include <initializer_list>
#include <string>

#include "backend/ops.h"
#include "base/error.h"

namespace strata {

class Check {
 public:
  explicit Check(const char* operation) : operation_(operation) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw InternalError(std::string(operation_) + ": " + what + " -> a fault of the caller; report it");
  }
  void that(bool holds, const char* what) const {
    if (!holds) fail(what);
  }

  void matrix(const char* name, const ConstMatrix& x, std::int64_t rows, std::int64_t cols) const {
    present(name, x.data);
    floating(name, x.dtype);
    if (x.rows != rows || x.cols != cols || x.stride < x.cols) {
      fail(std::string(name) + " is " + shape(x) + ", expected " + std::to_string(rows) + " x " +
           std::to_string(cols));
    }
  }
  // count < 0: any
  void flat(const char* name, const ConstFlat& x, std::int64_t count) const {
    if (x.count != 0 || count > 0) present(name, x.data);
    floating(name, x.dtype);
    if (x.count < 0 || (count >= 0 && x.count != count)) {
      fail(std::string(name) + " has " + std::to_string(x.count) + " elements, expected " +
           std::to_string(count));
    }
  }
  void dtype(const char* name, DType found, DType expected) const {
    if (found != expected) {
      fail(std::string(name) + " is " + name_of(found) + ", expected " + name_of(expected));
    }
  }
  void present(const char* name, const void* pointer) const {
    if (pointer == nullptr) fail(std::string(name) + " is missing");
  }

 private:
  void floating(const char* name, DType type) const {
    if (type != DType::f32 && type != DType::bf16) {
      fail(std::string(name) + " is " + name_of(type) + ", expected fp32 or bf16");
    }
  }
  static std::string shape(const ConstMatrix& x) {
    return std::to_string(x.rows) + " x " + std::to_string(x.cols) + " (stride " + std::to_string(x.stride) +
           ")";
  }

  const char* operation_;
};

namespace checks {

inline void linear_forward(const ConstMatrix& y, const ConstMatrix& x, const ConstMatrix& w) {
  const Check check("linear_forward");
  check.matrix("x", x, x.rows, x.cols);
  check.matrix("w", w, w.rows, x.cols);
  check.matrix("y", y, x.rows, w.rows);
  check.dtype("w", w.dtype, x.dtype);
  check.dtype("y", y.dtype, x.dtype);
}

inline void linear_backward_input(const ConstMatrix& dx, const ConstMatrix& dy, const ConstMatrix& w) {
  const Check check("linear_backward_input");
  check.matrix("dy", dy, dy.rows, dy.cols);
  check.matrix("w", w, dy.cols, w.cols);
  check.matrix("dx", dx, dy.rows, w.cols);
  check.dtype("w", w.dtype, dy.dtype);
  check.dtype("dx", dx.dtype, dy.dtype);
}

inline void linear_backward_weight(const ConstMatrix& dw, const ConstMatrix& dy, const ConstMatrix& x) {
  const Check check("linear_backward_weight");
  check.matrix("dy", dy, dy.rows, dy.cols);
  check.matrix("x", x, dy.rows, x.cols);
  check.matrix("dw", dw, dy.cols, x.cols);
  check.dtype("x", x.dtype, dy.dtype);
}

inline void embedding_forward(const ConstMatrix& out, const ConstMatrix& table, const std::int32_t* tokens) {
  const Check check("embedding_forward");
  check.matrix("table", table, table.rows, table.cols);
  check.matrix("out", out, out.rows, table.cols);
  check.dtype("out", out.dtype, table.dtype);
  check.present("tokens", tokens);
}

inline void embedding_backward(const ConstMatrix& dtable, const ConstMatrix& dout,
                               const std::int32_t* tokens) {
  const Check check("embedding_backward");
  check.matrix("dout", dout, dout.rows, dout.cols);
  check.matrix("dtable", dtable, dtable.rows, dout.cols);
  check.present("tokens", tokens);
}

inline void rmsnorm_forward(const ConstMatrix& y, const float* rstd, const ConstMatrix& sum,
                            const ConstMatrix& x, const ConstMatrix& residual, const ConstFlat& weight) {
  const Check check("rmsnorm_forward");
  check.matrix("x", x, x.rows, x.cols);
  check.matrix("y", y, x.rows, x.cols);
  check.dtype("y", y.dtype, x.dtype);
  check.flat("weight", weight, x.cols);
  check.dtype("weight", weight.dtype, x.dtype);
  check.present("rstd", rstd);
  if (sum) check.matrix("sum", sum, x.rows, x.cols), check.dtype("sum", sum.dtype, x.dtype);
  if (residual) {
    check.matrix("residual", residual, x.rows, x.cols);
    check.dtype("residual", residual.dtype, x.dtype);
  }
}

inline void rmsnorm_backward(const ConstMatrix& dx, const ConstFlat& dweight, const ConstMatrix& dy,
                             const ConstMatrix& dresidual, const ConstMatrix& h, const ConstFlat& weight,
                             const float* rstd) {
  const Check check("rmsnorm_backward");
  check.matrix("h", h, h.rows, h.cols);
  check.matrix("dy", dy, h.rows, h.cols);
  check.matrix("dx", dx, h.rows, h.cols);
  check.dtype("dy", dy.dtype, h.dtype);
  check.dtype("dx", dx.dtype, h.dtype);
  check.flat("weight", weight, h.cols);
  check.dtype("weight", weight.dtype, h.dtype);
  check.flat("dweight", dweight, h.cols);
  check.present("rstd", rstd);
  if (dresidual) {
    check.matrix("dresidual", dresidual, h.rows, h.cols);
    check.dtype("dresidual", dresidual.dtype, h.dtype);
  }
}

inline void rope(const ConstMatrix& x, std::int64_t head_size, std::int64_t sequence, const float* cosine,
                 const float* sine) {
  const Check check("rope");
  check.matrix("x", x, x.rows, x.cols);
  check.that(head_size > 0 && head_size % 2 == 0 && x.cols % head_size == 0,
             "the head size is odd or does not divide the columns of x");
  check.that(sequence > 0, "the sequence is empty");
  check.present("cosine", cosine);
  check.present("sine", sine);
}

inline void attention_shapes(const Check& check, const AttentionShape& s, const ConstMatrix& q,
                             const ConstMatrix& k, const ConstMatrix& v) {
  check.that(s.batch > 0 && s.sequence > 0 && s.query_heads > 0 && s.key_value_heads > 0,
             "the shape is empty");
  check.that(s.query_heads % s.key_value_heads == 0, "query heads are not a multiple of key/value heads");
  check.that(s.head_size >= 2 && s.head_size <= 256 && s.head_size % 2 == 0,
             "the head size is not even in [2, 256]");
  const std::int64_t n = s.batch * s.sequence;
  check.matrix("q", q, n, s.query_heads * s.head_size);
  check.matrix("k", k, n, s.key_value_heads * s.head_size);
  check.matrix("v", v, n, s.key_value_heads * s.head_size);
  check.dtype("k", k.dtype, q.dtype);
  check.dtype("v", v.dtype, q.dtype);
}

inline void attention_forward(const AttentionShape& shape, const ConstMatrix& out, const float* lse,
                              const ConstMatrix& q, const ConstMatrix& k, const ConstMatrix& v) {
  const Check check("attention_forward");
  attention_shapes(check, shape, q, k, v);
  check.matrix("out", out, q.rows, q.cols);
  check.dtype("out", out.dtype, q.dtype);
  check.present("lse", lse);
}

inline void attention_backward(const AttentionShape& shape, const ConstMatrix& dq, const ConstMatrix& dk,
                               const ConstMatrix& dv, const ConstMatrix& dout, const ConstMatrix& out,
                               const float* lse, const ConstMatrix& q, const ConstMatrix& k,
                               const ConstMatrix& v) {
  const Check check("attention_backward");
  attention_shapes(check, shape, q, k, v);
  check.matrix("out", out, q.rows, q.cols);
  check.matrix("dout", dout, q.rows, q.cols);
  check.matrix("dq", dq, q.rows, q.cols);
  check.matrix("dk", dk, k.rows, k.cols);
  check.matrix("dv", dv, v.rows, v.cols);
  for (const DType type : {out.dtype, dout.dtype, dq.dtype, dk.dtype, dv.dtype}) {
    check.dtype("a gradient or the output", type, q.dtype);
  }
  check.present("lse", lse);
}

inline void swiglu_forward(const ConstMatrix& out, const ConstMatrix& gate_up) {
  const Check check("swiglu_forward");
  check.matrix("out", out, out.rows, out.cols);
  check.matrix("gate_up", gate_up, out.rows, 2 * out.cols);
  check.dtype("gate_up", gate_up.dtype, out.dtype);
}

inline void swiglu_backward(const ConstMatrix& dgate_up, const ConstMatrix& dout,
                            const ConstMatrix& gate_up) {
  const Check check("swiglu_backward");
  check.matrix("dout", dout, dout.rows, dout.cols);
  check.matrix("gate_up", gate_up, dout.rows, 2 * dout.cols);
  check.matrix("dgate_up", dgate_up, dout.rows, 2 * dout.cols);
  check.dtype("gate_up", gate_up.dtype, dout.dtype);
  check.dtype("dgate_up", dgate_up.dtype, dout.dtype);
}

inline void cross_entropy(const ConstMatrix& logits, const float* losses, const std::int32_t* targets) {
  const Check check("cross_entropy");
  check.matrix("logits", logits, logits.rows, logits.cols);
  check.that(logits.cols > 0, "the vocabulary is empty");
  check.present("losses", losses);
  check.present("targets", targets);
}

inline void sum(const double* out, const float* values, std::int64_t count) {
  const Check check("sum");
  check.present("out", out);
  check.flat("values", {values, DType::f32, count}, -1);
}

inline void sum_of_squares(const double* out, const ConstFlat& x) {
  const Check check("sum_of_squares");
  check.present("out", out);
  check.flat("x", x, -1);
}

inline void clip_scale(const StepScale* out, const double* sums) {
  const Check check("clip_scale");
  check.present("out", out);
  check.present("sums", sums);
}

inline void adamw(const AdamWStep& step, const ConstFlat& parameter, const ConstFlat& compute,
                  const ConstFlat& gradient, const ConstFlat& m, const ConstFlat& v, const StepScale* scale) {
  const Check check("adamw");
  check.flat("parameter", parameter, -1);
  check.flat("gradient", gradient, parameter.count);
  check.flat("m", m, parameter.count);
  check.flat("v", v, parameter.count);
  check.dtype("m", m.dtype, parameter.dtype);
  check.dtype("v", v.dtype, parameter.dtype);
  check.present("scale", scale);
  check.that(step.step >= 1, "step is not counted from 1");
  check.that(!step.stochastic_rounding || parameter.dtype == DType::bf16,
             "stochastic rounding was asked for parameters that are not bf16");
  if (compute)
    check.flat("compute", compute, parameter.count), check.dtype("compute", compute.dtype, DType::bf16);
}

inline void sgd(const ConstFlat& parameter, const ConstFlat& compute, const ConstFlat& gradient,
                const StepScale* scale) {
  const Check check("sgd");
  check.flat("parameter", parameter, -1);
  check.flat("gradient", gradient, parameter.count);
  check.present("scale", scale);
  if (compute)
    check.flat("compute", compute, parameter.count), check.dtype("compute", compute.dtype, DType::bf16);
}

inline void fill(const ConstFlat& out) {
  const Check check("fill");
  check.flat("out", out, -1);
}

inline void cast(const ConstFlat& out, const ConstFlat& in) {
  const Check check("cast");
  check.flat("in", in, -1);
  check.flat("out", out, in.count);
}

inline void axpby(const ConstFlat& y, const ConstFlat& x) {
  const Check check("axpby");
  check.flat("y", y, -1);
  check.flat("x", x, y.count);
}

inline void pseudo_gradient(const ConstFlat& delta, const ConstFlat& theta_old, const ConstFlat& theta) {
  const Check check("pseudo_gradient");
  check.flat("delta", delta, -1);
  check.flat("theta_old", theta_old, delta.count);
  check.flat("theta", theta, delta.count);
}

inline void outer_step(const OuterStep& step, const ConstFlat& theta, const ConstFlat& compute,
                       const ConstFlat& theta_old, const ConstFlat& momentum, const ConstFlat& delta) {
  const Check check("outer_step");
  check.flat("theta", theta, -1);
  check.flat("theta_old", theta_old, theta.count);
  check.flat("delta", delta, theta.count);
  if (step.rule != OuterRule::fedavg) {
    check.flat("momentum", momentum, theta.count);
    check.dtype("momentum", momentum.dtype, DType::f32);
  }
  if (compute)
    check.flat("compute", compute, theta.count), check.dtype("compute", compute.dtype, DType::bf16);
}

inline void quantize_int8(const std::int8_t* q, const float* scales, const ConstFlat& error,
                          const ConstFlat& x, std::int64_t block) {
  const Check check("quantize_int8");
  check.that(block > 0, "the block is empty");
  check.flat("x", x, -1);
  check.that(x.count == 0 || (q != nullptr && scales != nullptr), "q or scales is missing");
  if (error) check.flat("error", error, x.count), check.dtype("error", error.dtype, DType::f32);
}

inline void dequantize_int8(const ConstFlat& out, const std::int8_t* q, const float* scales,
                            std::int64_t block) {
  const Check check("dequantize_int8");
  check.that(block > 0, "the block is empty");
  check.flat("out", out, -1);
  check.that(out.count == 0 || (q != nullptr && scales != nullptr), "q or scales is missing");
}

inline void initialize_normal(const ConstFlat& out, std::int64_t first_element) {
  const Check check("initialize_normal");
  check.flat("out", out, -1);
  check.that(first_element >= 0, "first_element is negative");
}

}  // namespace checks
}  // namespace strata
