// Runs attention's kernels on random data and compares them, row by row, with the reference in double
// precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "cuda/kernels/attention.h"
#include "tests/support/catch.h"
#include "tests/support/device_array.h"
#include "tests/support/ops_fixture.h"
#if defined(STRATA_EMULATE)
#include "cuda/emulation/options.h"
#endif

namespace strata::test {

// Rows of `columns` values with a gap of sentinel elements after each, in device memory.
class DeviceTensor {
 public:
  DeviceTensor(DType type, std::int64_t rows, std::int64_t columns, std::int64_t gap, double fill)
      : host_(type, rows, columns, gap, fill), device_(host_.bytes()) {}
  DeviceTensor(DType type, std::int64_t rows, std::int64_t columns, const Vector& values, std::int64_t gap)
      : host_(type, rows, columns, values, gap), device_(host_.bytes()) {}
  Matrix matrix() {
    Matrix m = host_.matrix();
    m.data = device_.data();
    return m;
  }
  // Columns first to first + count.
  Matrix columns(std::int64_t first, std::int64_t count) {
    return matrix().block(0, first, matrix().rows, count);
  }
  std::vector<unsigned char> bytes() const { return device_.download(); }
  // Values as they are in device memory now.
  Tensor download() {
    const auto bytes = device_.download();
    std::copy(bytes.begin(), bytes.end(), static_cast<unsigned char*>(host_.matrix().data));
    return host_;
  }

 private:
  Tensor host_;
  DeviceArray<unsigned char> device_;
};

struct AttentionProblem {
  DType type = DType::bf16;
  reference::Attention size{};  // batch, sequence, query_heads, kv_heads, head
  double scale = 1;             // of q and k
  double value_scale = 1;       // of v and dout
  std::int64_t gap = 8;         // elements between rows
  unsigned seed = 1;
  std::function<void(AttentionProblem&)> change;  // of the inputs, before the run
  Vector q{}, k{}, v{}, dout{};                   // (N, Hq D), (N, Hkv D), (N, Hkv D), (N, Hq D)

  AttentionProblem(DType dtype, reference::Attention s) : type(dtype), size(s) {}
  AttentionShape shape() const {
    return {size.batch, size.sequence, size.query_heads, size.kv_heads, size.head};
  }
  int tokens() const { return size.batch * size.sequence; }
  int query_columns() const { return size.query_heads * size.head; }
  int key_columns() const { return size.kv_heads * size.head; }
  void draw() {
    q = random_values(tokens() * query_columns(), type, seed, scale);
    k = random_values(tokens() * key_columns(), type, seed + 1, scale);
    v = random_values(tokens() * key_columns(), type, seed + 2, value_scale);
    dout = random_values(tokens() * query_columns(), type, seed + 3, value_scale);
    if (change) change(*this);
  }
};

struct AttentionOutcome {
  Vector out, lse, dq, dk, dv;
#if defined(STRATA_EMULATE)
  emulation::Counters forward, backward;
#endif
  std::vector<std::vector<unsigned char>> bits;  // of everything written
};

// One (N, q + k + v) matrix, as the model has them.
inline Vector fuse(const AttentionProblem& p) {
  Vector fused;
  const int qc = p.query_columns(), kc = p.key_columns();
  for (int r = 0; r < p.tokens(); ++r) {
    fused.insert(fused.end(), p.q.begin() + r * qc, p.q.begin() + (r + 1) * qc);
    fused.insert(fused.end(), p.k.begin() + r * kc, p.k.begin() + (r + 1) * kc);
    fused.insert(fused.end(), p.v.begin() + r * kc, p.v.begin() + (r + 1) * kc);
  }
  return fused;
}
inline Vector columns_of(const Vector& x, int width, int first, int count) {
  Vector out;
  for (std::size_t r = 0; r < x.size(); r += width) {
    out.insert(out.end(), x.begin() + r + first, x.begin() + r + first + count);
  }
  return out;
}

// Draws the inputs and runs forward and (if wanted) backward, in the options in force. Checks that nothing
// outside of the results was written.
inline AttentionOutcome run_attention(AttentionProblem& p, bool backward = true) {
  p.draw();
  const int qc = p.query_columns(), kc = p.key_columns(), n = p.tokens(), width = qc + 2 * kc;
  DeviceTensor qkv(p.type, n, width, fuse(p), p.gap), out(p.type, n, qc, p.gap, NAN);
  DeviceTensor dqkv(p.type, n, width, p.gap, NAN), dout(p.type, n, qc, p.dout, p.gap);
  DeviceArray<float> lse(static_cast<std::size_t>(n) * p.size.query_heads);
  AttentionOutcome o;
#if defined(STRATA_EMULATE)
  emulation::reset_counters();
#endif
  gpu::attention_forward(nullptr, p.shape(), out.matrix(), lse.data(), qkv.columns(0, qc),
                         qkv.columns(qc, kc), qkv.columns(qc + kc, kc));
#if defined(STRATA_EMULATE)
  o.forward = emulation::total_counters();
  emulation::reset_counters();
#endif
  const auto statistics = lse.download();
  o.lse.assign(statistics.begin(), statistics.end());
  o.bits.push_back(out.bytes());
  o.out = out.download().values();
  CHECK(out.download().gaps_untouched());
  if (!backward) return o;

  DeviceArray<unsigned char> scratch(gpu::attention_backward_scratch_bytes(p.shape()));
  gpu::attention_backward(nullptr, p.shape(), dqkv.columns(0, qc), dqkv.columns(qc, kc),
                          dqkv.columns(qc + kc, kc), dout.matrix(), out.matrix(), lse.data(),
                          qkv.columns(0, qc), qkv.columns(qc, kc), qkv.columns(qc + kc, kc), scratch.data());
#if defined(STRATA_EMULATE)
  o.backward = emulation::total_counters();
#endif
  o.bits.push_back(dqkv.bytes());
  const Vector gradients = dqkv.download().values();
  CHECK(dqkv.download().gaps_untouched());
  o.dq = columns_of(gradients, width, 0, qc);
  o.dk = columns_of(gradients, width, qc, kc);
  o.dv = columns_of(gradients, width, qc + kc, kc);
  return o;
}

// The largest error of a row of one head (by norm), over that row's norm plus `floor` times the root mean
// square norm of all rows. NaN where either holds one that the other does not.
inline double worst_row(const Vector& found, const Vector& expected, int head, double floor) {
  REQUIRE(found.size() == expected.size());
  double mean = 0;
  for (const double x : expected) mean += x * x;
  mean = std::sqrt(mean / (expected.size() / head));
  double worst = 0;
  for (std::size_t row = 0; row < expected.size(); row += head) {
    double error = 0, norm = 0;
    for (int d = 0; d < head; ++d) {
      error += std::pow(found[row + d] - expected[row + d], 2);
      norm += std::pow(expected[row + d], 2);
    }
    const double ratio = std::sqrt(error) / (std::sqrt(norm) + floor * mean);
    if (!(ratio <= worst)) worst = ratio;
  }
  return worst;
}

// How far results may be off, by row. In bf16 the output is rounded once (2^-9 at most an element) and so is
// each probability; a gradient of a score also subtracts out . dout with out rounded.
struct AttentionTolerance {
  double out, lse, gradient;
};
inline AttentionTolerance attention_tolerance(const AttentionProblem& p) {
  if (p.type == DType::f32) return {5e-6, 5e-6, 2e-5};
  return {6e-3, 5e-6, 2e-2};
}

inline void check_attention(AttentionProblem& p, bool backward = true) {
  const auto& s = p.size;
  CAPTURE(name_of(p.type), s.batch, s.sequence, s.query_heads, s.kv_heads, s.head, p.scale, p.value_scale,
          p.gap);
  const AttentionOutcome found = run_attention(p, backward);
  const auto expected = reference::attention(s, p.q, p.k, p.v);
  const AttentionTolerance allowed = attention_tolerance(p);
  CHECK(worst_row(found.out, expected.out, s.head, 0) < allowed.out);
  double largest = 1;
  for (const double x : expected.lse) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < found.lse.size(); ++i) {
    if (!(std::abs(found.lse[i] - expected.lse[i]) <= allowed.lse * largest)) {
      FAIL_CHECK("lse " << i << " is " << found.lse[i] << ", expected " << expected.lse[i]);
      break;
    }
  }
  if (!backward) return;
  const auto gradient = reference::attention_backward(s, expected, p.dout, p.q, p.k, p.v);
  // The first token's dq and (with one token) dk are zero but for rounding: measured against dv's rows then.
  const auto with_floor = [&](const Vector& f, const Vector& e) {
    return s.sequence == 1 ? worst_row(f, e, s.head, 0) : worst_row(f, e, s.head, 1);
  };
  CHECK(with_floor(found.dv, gradient.dv) < allowed.gradient);
  if (s.sequence > 1) {
    CHECK(with_floor(found.dq, gradient.dq) < allowed.gradient);
    CHECK(with_floor(found.dk, gradient.dk) < allowed.gradient);
  } else {
    for (const Vector* zero : {&found.dq, &found.dk}) {
      for (const double x : *zero)
        CHECK(std::abs(x) < 0.1 * p.scale * p.value_scale * p.value_scale * s.query_heads);
    }
  }
}

}  // namespace strata::test
