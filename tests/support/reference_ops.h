#pragma once
// The operations that a model's forward, backward and AdamW need, written as plainly as possible: loops over
// elements, arithmetic in fp64, one rounding when a result is stored. Slow; for tests of what stands on Ops.
// Federation and initialisation have no place here and throw.
#include <cmath>
#include <cstdint>
#include <vector>

#include "backend/cpu/device.h"
#include "backend/ops.h"
#include "base/error.h"

namespace strata::test {

inline double get(const void* p, DType dtype, std::int64_t i) {
  return dtype == DType::bf16 ? to_float(static_cast<const bf16*>(p)[i]) : static_cast<const float*>(p)[i];
}
inline void set(void* p, DType dtype, std::int64_t i, double value) {
  if (dtype == DType::bf16) {
    static_cast<bf16*>(p)[i] = to_bf16(static_cast<float>(value));
  } else {
    static_cast<float*>(p)[i] = static_cast<float>(value);
  }
}
inline double get(ConstMatrix m, std::int64_t r, std::int64_t c) {
  return get(m.data, m.dtype, r * m.stride + c);
}
inline void set(Matrix m, std::int64_t r, std::int64_t c, double v) {
  set(m.data, m.dtype, r * m.stride + c, v);
}
inline double get(ConstFlat f, std::int64_t i) {
  return get(f.data, f.dtype, i);
}
inline void set(Flat f, std::int64_t i, double v) {
  set(f.data, f.dtype, i, v);
}

class ReferenceOps final : public Ops {
 public:
  std::size_t workspace_bytes(const Workload&) const override { return 0; }

  void linear_forward(Stream& s, Matrix y, ConstMatrix x, ConstMatrix w) override {
    enqueue(s, [=] {
      each(y, [&](std::int64_t n, std::int64_t o) {
        double sum = 0;
        for (std::int64_t i = 0; i < x.cols; ++i) sum += get(x, n, i) * get(w, o, i);
        return sum;
      });
    });
  }
  void linear_backward_input(Stream& s, Matrix dx, ConstMatrix dy, ConstMatrix w, bool accumulate) override {
    enqueue(s, [=] {
      each(dx, [&](std::int64_t n, std::int64_t i) {
        double sum = accumulate ? get(dx, n, i) : 0;
        for (std::int64_t o = 0; o < dy.cols; ++o) sum += get(dy, n, o) * get(w, o, i);
        return sum;
      });
    });
  }
  void linear_backward_weight(Stream& s, Matrix dw, ConstMatrix dy, ConstMatrix x, bool accumulate) override {
    enqueue(s, [=] {
      each(dw, [&](std::int64_t o, std::int64_t i) {
        double sum = accumulate ? get(dw, o, i) : 0;
        for (std::int64_t n = 0; n < x.rows; ++n) sum += get(dy, n, o) * get(x, n, i);
        return sum;
      });
    });
  }

  void embedding_forward(Stream& s, Matrix out, ConstMatrix table, const std::int32_t* tokens) override {
    enqueue(s, [=] { each(out, [&](std::int64_t n, std::int64_t c) { return get(table, tokens[n], c); }); });
  }
  void embedding_backward(Stream& s, Matrix dtable, ConstMatrix dout, const std::int32_t* tokens,
                          bool accumulate) override {
    enqueue(s, [=] {
      each(dtable, [&](std::int64_t v, std::int64_t c) {
        double sum = accumulate ? get(dtable, v, c) : 0;
        for (std::int64_t n = 0; n < dout.rows; ++n) sum += tokens[n] == v ? get(dout, n, c) : 0;
        return sum;
      });
    });
  }

  void rmsnorm_forward(Stream& s, Matrix y, float* rstd, Matrix sum, ConstMatrix x, ConstMatrix residual,
                       ConstFlat weight, float eps) override {
    enqueue(s, [=] {
      std::vector<float> h(static_cast<std::size_t>(x.cols));
      for (std::int64_t n = 0; n < x.rows; ++n) {
        double squares = 0;
        for (std::int64_t c = 0; c < x.cols; ++c) {
          set(h.data(), DType::f32, c, get(x, n, c) + (residual ? get(residual, n, c) : 0));
          if (x.dtype == DType::bf16) h[c] = to_float(to_bf16(h[c]));
          squares += static_cast<double>(h[c]) * h[c];
        }
        rstd[n] = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(x.cols) + eps));
        for (std::int64_t c = 0; c < x.cols; ++c) {
          if (sum) set(sum, n, c, h[c]);
          set(y, n, c, static_cast<double>(h[c]) * rstd[n] * get(weight, c));
        }
      }
    });
  }
  void rmsnorm_backward(Stream& s, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                        ConstMatrix h, ConstFlat weight, const float* rstd,
                        bool accumulate_dweight) override {
    enqueue(s, [=] {
      const std::int64_t width = h.cols;
      std::vector<double> dw(static_cast<std::size_t>(width));
      for (std::int64_t c = 0; c < width; ++c) dw[c] = accumulate_dweight ? get(dweight, c) : 0;
      for (std::int64_t n = 0; n < h.rows; ++n) {
        double dot = 0;
        for (std::int64_t c = 0; c < width; ++c) {
          dot += get(dy, n, c) * get(weight, c) * get(h, n, c) * rstd[n];
          dw[c] += get(dy, n, c) * get(h, n, c) * rstd[n];
        }
        for (std::int64_t c = 0; c < width; ++c) {
          const double normalized = get(h, n, c) * rstd[n];
          const double d =
              rstd[n] * (get(dy, n, c) * get(weight, c) - normalized * dot / static_cast<double>(width));
          set(dx, n, c, d + (dresidual ? get(dresidual, n, c) : 0));
        }
      }
      for (std::int64_t c = 0; c < width; ++c) set(dweight, c, dw[c]);
    });
  }

  void rope(Stream& s, Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine,
            const float* sine, bool inverse) override {
    enqueue(s, [=] {
      const std::int64_t half = head_size / 2;
      for (std::int64_t n = 0; n < x.rows; ++n) {
        for (std::int64_t c = 0; c < x.cols; ++c) {
          if (c % head_size >= half) continue;
          const std::int64_t angle = (n % sequence) * half + c % head_size;
          const double co = cosine[angle], si = inverse ? -sine[angle] : sine[angle];
          const double a = get(x, n, c), b = get(x, n, c + half);
          set(x, n, c, a * co - b * si), set(x, n, c + half, b * co + a * si);
        }
      }
    });
  }

  void attention_forward(Stream& s, const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q,
                         ConstMatrix k, ConstMatrix v) override {
    enqueue(s, [=] {
      each_query(shape,
                 [&](std::int64_t row, std::int64_t first, std::int64_t qc, std::int64_t kc, std::int64_t l) {
                   std::vector<double> p(static_cast<std::size_t>(row - first + 1));
                   double sum = 0;
                   for (std::int64_t r = first; r <= row; ++r)
                     sum += p[r - first] = std::exp(score(shape, q, k, row, r, qc, kc));
                   lse[l] = static_cast<float>(std::log(sum));
                   for (std::int64_t d = 0; d < shape.head_size; ++d) {
                     double o = 0;
                     for (std::int64_t r = first; r <= row; ++r) o += p[r - first] / sum * get(v, r, kc + d);
                     set(out, row, qc + d, o);
                   }
                 });
    });
  }
  void attention_backward(Stream& s, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
                          ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
                          ConstMatrix v) override {
    enqueue(s, [=] {
      const std::int64_t size = shape.head_size;
      const double scale = 1 / std::sqrt(static_cast<double>(size));
      std::vector<double> sum_q(dq.rows * dq.cols), sum_k(dk.rows * dk.cols), sum_v(dv.rows * dv.cols);
      each_query(shape,
                 [&](std::int64_t row, std::int64_t first, std::int64_t qc, std::int64_t kc, std::int64_t l) {
                   double delta = 0;
                   for (std::int64_t d = 0; d < size; ++d)
                     delta += get(dout, row, qc + d) * get(out, row, qc + d);
                   for (std::int64_t r = first; r <= row; ++r) {
                     const double p = std::exp(score(shape, q, k, row, r, qc, kc) - lse[l]);
                     double dp = 0;
                     for (std::int64_t d = 0; d < size; ++d) dp += get(dout, row, qc + d) * get(v, r, kc + d);
                     const double ds = p * (dp - delta) * scale;
                     for (std::int64_t d = 0; d < size; ++d) {
                       sum_v[r * dv.cols + kc + d] += p * get(dout, row, qc + d);
                       sum_q[row * dq.cols + qc + d] += ds * get(k, r, kc + d);
                       sum_k[r * dk.cols + kc + d] += ds * get(q, row, qc + d);
                     }
                   }
                 });
      each(dq, [&](std::int64_t r, std::int64_t c) { return sum_q[r * dq.cols + c]; });
      each(dk, [&](std::int64_t r, std::int64_t c) { return sum_k[r * dk.cols + c]; });
      each(dv, [&](std::int64_t r, std::int64_t c) { return sum_v[r * dv.cols + c]; });
    });
  }

  void swiglu_forward(Stream& s, Matrix out, ConstMatrix gate_up) override {
    enqueue(s, [=] {
      each(out, [&](std::int64_t n, std::int64_t f) {
        const double gate = get(gate_up, n, f);
        return gate / (1 + std::exp(-gate)) * get(gate_up, n, f + out.cols);
      });
    });
  }
  void swiglu_backward(Stream& s, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up) override {
    enqueue(s, [=] {
      for (std::int64_t n = 0; n < dout.rows; ++n) {
        for (std::int64_t f = 0; f < dout.cols; ++f) {
          const double gate = get(gate_up, n, f), up = get(gate_up, n, f + dout.cols), d = get(dout, n, f);
          const double sigmoid = 1 / (1 + std::exp(-gate));
          set(dgate_up, n, f, d * up * sigmoid * (1 + gate * (1 - sigmoid)));
          set(dgate_up, n, f + dout.cols, d * gate * sigmoid);
        }
      }
    });
  }

  void cross_entropy(Stream& s, Matrix logits, float* losses, const std::int32_t* targets,
                     bool write_gradient) override {
    enqueue(s, [=] {
      for (std::int64_t n = 0; n < logits.rows; ++n) {
        const bool counts = targets[n] >= 0;
        double sum = 0, largest = -INFINITY;
        for (std::int64_t v = 0; v < logits.cols; ++v) largest = std::max(largest, get(logits, n, v));
        for (std::int64_t v = 0; v < logits.cols; ++v) sum += std::exp(get(logits, n, v) - largest);
        const double lse = largest + std::log(sum);
        losses[n] = counts ? static_cast<float>(lse - get(logits, n, targets[n])) : 0;
        for (std::int64_t v = 0; write_gradient && v < logits.cols; ++v) {
          const double p = std::exp(get(logits, n, v) - lse);
          set(logits, n, v, counts ? p - (v == targets[n] ? 1 : 0) : 0);
        }
      }
    });
  }

  void sum(Stream& s, double* out, const float* values, std::int64_t count, bool accumulate) override {
    enqueue(s, [=] {
      double total = accumulate ? *out : 0;
      for (std::int64_t i = 0; i < count; ++i) total += values[i];
      *out = total;
    });
  }
  void sum_of_squares(Stream& s, double* out, ConstFlat x, bool accumulate) override {
    enqueue(s, [=] {
      double total = accumulate ? *out : 0;
      for (std::int64_t i = 0; i < x.count; ++i) total += get(x, i) * get(x, i);
      *out = total;
    });
  }
  void clip_scale(Stream& s, StepScale* out, const double* sums, float max_norm) override {
    enqueue(s, [=] {
      const double norm = std::sqrt(sums[0]) / sums[1];
      out->norm = static_cast<float>(norm);
      out->gradient_scale =
          static_cast<float>((max_norm > 0 && norm > max_norm ? max_norm / norm : 1) / sums[1]);
      out->finite = std::isfinite(norm) ? 1 : 0;
    });
  }
  void adamw(Stream& s, const AdamWStep& a, Flat parameter, Flat compute, ConstFlat gradient, Flat m, Flat v,
             const StepScale* scale) override {
    enqueue(s, [=] {
      if (scale->finite == 0) return;
      const double c1 = 1 - std::pow(static_cast<double>(a.beta1), a.step);
      const double c2 = 1 - std::pow(static_cast<double>(a.beta2), a.step);
      for (std::int64_t i = 0; i < parameter.count; ++i) {
        const double g = get(gradient, i) * scale->gradient_scale;
        const double first = a.beta1 * get(m, i) + (1 - a.beta1) * g;
        const double second = a.beta2 * get(v, i) + (1 - a.beta2) * g * g;
        set(m, i, first), set(v, i, second);
        const double kept = get(parameter, i) * (1 - a.lr * a.weight_decay);
        const double next = kept - a.lr * (first / c1) / (std::sqrt(second / c2) + a.eps);
        set(parameter, i, next);
        if (compute) set(compute, i, next);
      }
    });
  }
  void fill(Stream& s, Flat out, float value) override {
    enqueue(s, [=] {
      for (std::int64_t i = 0; i < out.count; ++i) set(out, i, value);
    });
  }
  void cast(Stream& s, Flat out, ConstFlat in) override {
    enqueue(s, [=] {
      for (std::int64_t i = 0; i < out.count; ++i) set(out, i, get(in, i));
    });
  }

  void sgd(Stream&, float, float, Flat, Flat, ConstFlat, const StepScale*) override { refuse(); }
  void axpby(Stream&, Flat, float, ConstFlat, float) override { refuse(); }
  void pseudo_gradient(Stream&, Flat, ConstFlat, ConstFlat) override { refuse(); }
  void outer_step(Stream&, const OuterStep&, Flat, Flat, Flat, Flat, ConstFlat) override { refuse(); }
  void quantize_int8(Stream&, std::int8_t*, float*, Flat, ConstFlat, std::int64_t) override { refuse(); }
  void dequantize_int8(Stream&, Flat, const std::int8_t*, const float*, std::int64_t, float, bool) override {
    refuse();
  }
  void initialize_normal(Stream&, Flat, float, RandomKey, std::int64_t) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw InternalError("not an operation of the reference"); }

  template <class F>
  static void enqueue(Stream& s, F work) {
    cpu_stream(s).run(std::move(work));
  }
  template <class F>
  static void each(Matrix m, F value) {
    for (std::int64_t r = 0; r < m.rows; ++r) {
      for (std::int64_t c = 0; c < m.cols; ++c) set(m, r, c, value(r, c));
    }
  }
  // body(row, first row of its sequence, first query column, first key column, place in lse)
  template <class F>
  static void each_query(const AttentionShape& a, F body) {
    const std::int64_t ratio = a.query_heads / a.key_value_heads;
    for (std::int64_t b = 0; b < a.batch; ++b) {
      for (std::int64_t h = 0; h < a.query_heads; ++h) {
        for (std::int64_t t = 0; t < a.sequence; ++t) {
          body(b * a.sequence + t, b * a.sequence, h * a.head_size, h / ratio * a.head_size,
               (b * a.query_heads + h) * a.sequence + t);
        }
      }
    }
  }
  static double score(const AttentionShape& a, ConstMatrix q, ConstMatrix k, std::int64_t row, std::int64_t r,
                      std::int64_t qc, std::int64_t kc) {
    double sum = 0;
    for (std::int64_t d = 0; d < a.head_size; ++d) sum += get(q, row, qc + d) * get(k, r, kc + d);
    return sum / std::sqrt(static_cast<double>(a.head_size));
  }
};

}  // namespace strata::test
