#pragma once
// The operations of backend/ops.h written plainly, in double precision, one loop a formula. Kernels of every
// backend are compared with these. Matrices are row-major and dense.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace strata::reference {

using Vector = std::vector<double>;

// c (m, n) = op(a) op(b)
inline Vector product(const Vector& a, bool transpose_a, const Vector& b, bool transpose_b, int m, int n,
                      int k) {
  Vector c(static_cast<std::size_t>(m) * n);
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      for (int x = 0; x < k; ++x)
        c[i * n + j] +=
            (transpose_a ? a[x * m + i] : a[i * k + x]) * (transpose_b ? b[j * k + x] : b[x * n + j]);
  return c;
}

struct Norm {
  Vector y, rstd;
};
inline Norm rmsnorm(const Vector& h, const Vector& weight, int rows, int cols, double eps) {
  Norm r{Vector(h.size()), Vector(rows)};
  for (int i = 0; i < rows; ++i) {
    double squares = 0;
    for (int j = 0; j < cols; ++j) squares += h[i * cols + j] * h[i * cols + j];
    r.rstd[i] = 1 / std::sqrt(squares / cols + eps);
    for (int j = 0; j < cols; ++j) r.y[i * cols + j] = h[i * cols + j] * r.rstd[i] * weight[j];
  }
  return r;
}

struct NormGradient {
  Vector dx, dweight;
};
inline NormGradient rmsnorm_backward(const Vector& dy, const Vector& h, const Vector& weight,
                                     const Vector& rstd, int rows, int cols) {
  NormGradient g{Vector(h.size()), Vector(cols)};
  for (int i = 0; i < rows; ++i) {
    double mean = 0;  // of normalised input times incoming gradient
    for (int j = 0; j < cols; ++j) mean += dy[i * cols + j] * weight[j] * h[i * cols + j] * rstd[i] / cols;
    for (int j = 0; j < cols; ++j) {
      const double normalised = h[i * cols + j] * rstd[i];
      g.dx[i * cols + j] = rstd[i] * (dy[i * cols + j] * weight[j] - normalised * mean);
      g.dweight[j] += dy[i * cols + j] * normalised;
    }
  }
  return g;
}

// x (rows, heads * d): pair (i, i + d/2) of a head turns by angle(position, i).
inline Vector rope(Vector x, int rows, int heads, int d, int sequence, const Vector& cosine,
                   const Vector& sine, bool inverse) {
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < d / 2; ++i) {
        const double c = cosine[r % sequence * (d / 2) + i];
        const double s = sine[r % sequence * (d / 2) + i] * (inverse ? -1 : 1);
        double& a = x[(r * heads + h) * d + i];
        double& b = x[(r * heads + h) * d + i + d / 2];
        const double turned = a * c - b * s;
        b = b * c + a * s;
        a = turned;
      }
  return x;
}

struct Attention {
  int batch, sequence, query_heads, kv_heads, head;
};
struct AttentionResult {
  Vector out, lse, probabilities;  // probabilities (B, Hq, T, T)
};
inline AttentionResult attention(const Attention& s, const Vector& q, const Vector& k, const Vector& v) {
  const int T = s.sequence, D = s.head, group = s.query_heads / s.kv_heads;
  AttentionResult r{Vector(q.size()), Vector(s.batch * s.query_heads * T),
                    Vector(static_cast<std::size_t>(s.batch) * s.query_heads * T * T)};
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.query_heads; ++h)
      for (int i = 0; i < T; ++i) {
        double* p = &r.probabilities[((static_cast<std::size_t>(b) * s.query_heads + h) * T + i) * T];
        const double* qi = &q[((b * T + i) * s.query_heads + h) * D];
        double most = -INFINITY, sum = 0;
        for (int j = 0; j <= i; ++j) {
          const double* kj = &k[((b * T + j) * s.kv_heads + h / group) * D];
          for (int d = 0; d < D; ++d) p[j] += qi[d] * kj[d];
          p[j] /= std::sqrt(static_cast<double>(D));
          most = std::max(most, p[j]);
        }
        for (int j = 0; j <= i; ++j) sum += p[j] = std::exp(p[j] - most);
        r.lse[(b * s.query_heads + h) * T + i] = most + std::log(sum);
        for (int j = 0; j <= i; ++j) {
          p[j] /= sum;
          for (int d = 0; d < D; ++d)
            r.out[((b * T + i) * s.query_heads + h) * D + d] +=
                p[j] * v[((b * T + j) * s.kv_heads + h / group) * D + d];
        }
      }
  return r;
}

struct AttentionGradient {
  Vector dq, dk, dv;
};
inline AttentionGradient attention_backward(const Attention& s, const AttentionResult& forward,
                                            const Vector& dout, const Vector& q, const Vector& k,
                                            const Vector& v) {
  const int T = s.sequence, D = s.head, group = s.query_heads / s.kv_heads;
  AttentionGradient g{Vector(q.size()), Vector(k.size()), Vector(v.size())};
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.query_heads; ++h)
      for (int i = 0; i < T; ++i) {
        const double* p =
            &forward.probabilities[((static_cast<std::size_t>(b) * s.query_heads + h) * T + i) * T];
        const std::size_t qi = static_cast<std::size_t>((b * T + i) * s.query_heads + h) * D;
        Vector dp(i + 1);
        double mean = 0;
        for (int j = 0; j <= i; ++j) {
          const std::size_t kj = static_cast<std::size_t>((b * T + j) * s.kv_heads + h / group) * D;
          for (int d = 0; d < D; ++d) {
            dp[j] += dout[qi + d] * v[kj + d];
            g.dv[kj + d] += p[j] * dout[qi + d];
          }
          mean += p[j] * dp[j];
        }
        for (int j = 0; j <= i; ++j) {
          const std::size_t kj = static_cast<std::size_t>((b * T + j) * s.kv_heads + h / group) * D;
          const double ds = p[j] * (dp[j] - mean) / std::sqrt(static_cast<double>(D));
          for (int d = 0; d < D; ++d) {
            g.dq[qi + d] += ds * k[kj + d];
            g.dk[kj + d] += ds * q[qi + d];
          }
        }
      }
  return g;
}

inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// gate_up (rows, 2f)
inline Vector swiglu(const Vector& gate_up, int rows, int f) {
  Vector out(static_cast<std::size_t>(rows) * f);
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < f; ++j) {
      const double g = gate_up[r * 2 * f + j];
      out[r * f + j] = g * sigmoid(g) * gate_up[r * 2 * f + f + j];
    }
  return out;
}
inline Vector swiglu_backward(const Vector& dout, const Vector& gate_up, int rows, int f) {
  Vector d(gate_up.size());
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < f; ++j) {
      const double g = gate_up[r * 2 * f + j], u = gate_up[r * 2 * f + f + j], s = sigmoid(g);
      d[r * 2 * f + j] = dout[r * f + j] * u * (s + g * s * (1 - s));
      d[r * 2 * f + f + j] = dout[r * f + j] * g * s;
    }
  return d;
}

struct Loss {
  Vector losses, gradient;
};
inline Loss cross_entropy(const Vector& logits, const std::vector<std::int32_t>& targets, int rows, int v) {
  Loss r{Vector(rows), Vector(logits.size())};
  for (int i = 0; i < rows; ++i) {
    if (targets[i] < 0) continue;
    const double* x = &logits[static_cast<std::size_t>(i) * v];
    const double most = *std::max_element(x, x + v);
    double sum = 0;
    for (int j = 0; j < v; ++j) sum += std::exp(x[j] - most);
    r.losses[i] = most + std::log(sum) - x[targets[i]];
    for (int j = 0; j < v; ++j)
      r.gradient[static_cast<std::size_t>(i) * v + j] =
          std::exp(x[j] - most) / sum - (j == targets[i] ? 1 : 0);
  }
  return r;
}

}  // namespace strata::reference
