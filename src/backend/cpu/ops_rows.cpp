// RMSNorm, rotary embedding, SwiGLU and the sums of rows.
#include <algorithm>
#include <cmath>

#include "backend/cpu/ops_kernels.h"
#include "backend/cpu/ops_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/ops_rows.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/ops_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace {

using std::size_t;

template <class T>
const T* row_of(const ConstMatrix& x, std::int64_t r) {
  return static_cast<const T*>(x.data) + r * x.stride;
}
template <class T>
T* row_of(const Matrix& x, std::int64_t r) {
  return static_cast<T*>(x.data) + r * x.stride;
}

// Sum over [0, count) of f(i, n) in four chains, which hide the latency of the additions.
template <class F>
HWY_INLINE float sum_in_chains(size_t count, F&& f) {
  const size_t n = lanes();
  VecF s0 = hn::Zero(F32()), s1 = s0, s2 = s0, s3 = s0;
  size_t i = 0;
  for (; i + 4 * n <= count; i += 4 * n) {
    s0 = f(s0, i, n);
    s1 = f(s1, i + n, n);
    s2 = f(s2, i + 2 * n, n);
    s3 = f(s3, i + 3 * n, n);
  }
  for (; i < count; i += n) s0 = f(s0, i, std::min(n, count - i));
  return sum_of_lanes(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

template <class T>
void norm_forward(Matrix y, float* rstd, Matrix sum, ConstMatrix x, ConstMatrix residual, ConstFlat weight,
                  float eps, std::int64_t begin, std::int64_t end) {
  const auto columns = static_cast<size_t>(x.cols);
  const T* w = static_cast<const T*>(weight.data);
  for (std::int64_t r = begin; r < end; ++r) {
    const T* xr = row_of<T>(x, r);
    const T* res = residual ? row_of<T>(residual, r) : nullptr;
    T* s = sum ? row_of<T>(sum, r) : nullptr;
    auto input = [&](size_t i, size_t n) HWY_ATTR {
      return res ? rounded_to<T>(hn::Add(load(xr + i, n), load(res + i, n))) : load(xr + i, n);
    };
    const float squares = sum_in_chains(columns, [&](VecF acc, size_t i, size_t n) HWY_ATTR {
      const VecF h = input(i, n);
      if (s) store(h, s + i, n);
      return hn::MulAdd(h, h, acc);
    });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(columns) + eps);
    rstd[r] = scale;
    T* out = row_of<T>(y, r);
    const VecF vs = hn::Set(F32(), scale);
    for_vectors(columns, [&](size_t i, size_t n) HWY_ATTR {
      const VecF h = s ? load(s + i, n) : input(i, n);  // s may have replaced x or residual
      store(hn::Mul(hn::Mul(h, vs), load(w + i, n)), out + i, n);
    });
  }
}

template <class T>
void norm_backward(Matrix dx, float* dweight_sum, ConstMatrix dy, ConstMatrix dresidual, ConstMatrix h,
                   ConstFlat weight, const float* rstd, std::int64_t begin, std::int64_t end) {
  const auto columns = static_cast<size_t>(h.cols);
  const T* w = static_cast<const T*>(weight.data);
  for (std::int64_t r = begin; r < end; ++r) {
    const T* g = row_of<T>(dy, r);
    const T* hr = row_of<T>(h, r);
    const T* res = dresidual ? row_of<T>(dresidual, r) : nullptr;
    T* out = row_of<T>(dx, r);
    const float dot = sum_in_chains(columns, [&](VecF acc, size_t i, size_t n) HWY_ATTR {
      return hn::MulAdd(hn::Mul(load(g + i, n), load(w + i, n)), load(hr + i, n), acc);
    });
    const float scale = rstd[r];
    const VecF vs = hn::Set(F32(), scale);
    const VecF back = hn::Set(F32(), dot * scale * scale / static_cast<float>(columns));
    for_vectors(columns, [&](size_t i, size_t n) HWY_ATTR {
      const VecF gi = load(g + i, n), hi = load(hr + i, n);
      if (dweight_sum) {
        store(hn::MulAdd(gi, hn::Mul(hi, vs), load(dweight_sum + i, n)), dweight_sum + i, n);
      }
      VecF d = hn::Mul(vs, hn::NegMulAdd(hi, back, hn::Mul(gi, load(w + i, n))));
      if (res) d = hn::Add(d, load(res + i, n));
      store(d, out + i, n);
    });
  }
}

template <class T>
void rotate(Matrix x, size_t head_size, std::int64_t sequence, const float* cosine, const float* sine,
            bool inverse, std::int64_t begin, std::int64_t end) {
  const size_t half = head_size / 2, heads = static_cast<size_t>(x.cols) / head_size;
  for (std::int64_t r = begin; r < end; ++r) {
    const size_t position = static_cast<size_t>(r % sequence);
    const float* c = cosine + position * half;
    const float* s = sine + position * half;
    T* row = row_of<T>(x, r);
    for (size_t head = 0; head < heads; ++head, row += head_size) {
      for_vectors(half, [&](size_t i, size_t n) HWY_ATTR {
        const VecF ci = load(c + i, n);
        const VecF si = inverse ? hn::Neg(load(s + i, n)) : load(s + i, n);
        const VecF first = load(row + i, n), second = load(row + half + i, n);
        store(hn::NegMulAdd(second, si, hn::Mul(first, ci)), row + i, n);
        store(hn::MulAdd(first, si, hn::Mul(second, ci)), row + half + i, n);
      });
    }
  }
}

HWY_INLINE VecF sigmoid(VecF x) {
  const VecF one = hn::Set(F32(), 1.0f);
  return hn::Div(one, hn::Add(one, exp(hn::Neg(x))));
}

template <class T>
void glu_forward(Matrix out, ConstMatrix gate_up, std::int64_t begin, std::int64_t end) {
  const auto columns = static_cast<size_t>(out.cols);
  for (std::int64_t r = begin; r < end; ++r) {
    const T* gate = row_of<T>(gate_up, r);
    const T* up = gate + columns;
    T* to = row_of<T>(out, r);
    for_vectors(columns, [&](size_t i, size_t n) HWY_ATTR {
      const VecF g = load(gate + i, n);
      store(hn::Mul(hn::Mul(g, sigmoid(g)), load(up + i, n)), to + i, n);
    });
  }
}

template <class T>
void glu_backward(Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up, std::int64_t begin,
                  std::int64_t end) {
  const auto columns = static_cast<size_t>(dout.cols);
  const VecF one = hn::Set(F32(), 1.0f);
  for (std::int64_t r = begin; r < end; ++r) {
    const T* gate = row_of<T>(gate_up, r);
    const T* up = gate + columns;
    const T* d = row_of<T>(dout, r);
    T* dgate = row_of<T>(dgate_up, r);
    T* dup = dgate + columns;
    for_vectors(columns, [&](size_t i, size_t n) HWY_ATTR {
      const VecF g = load(gate + i, n), u = load(up + i, n), di = load(d + i, n);
      const VecF s = sigmoid(g), silu = hn::Mul(g, s);
      // d silu / d gate = s (1 + gate (1 - s))
      const VecF slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
      store(hn::Mul(hn::Mul(di, u), slope), dgate + i, n);
      store(hn::Mul(di, silu), dup + i, n);
    });
  }
}

template <class To, class From>
void add_gathered(To* to, const ConstMatrix& from, const std::int64_t* rows, std::int64_t count,
                  bool accumulate, float* sums) {
  const auto columns = static_cast<size_t>(from.cols);
  for (std::int64_t k = 0; k < count; ++k) {
    const From* row = row_of<From>(from, rows[k]);
    const bool first = k == 0, last = k + 1 == count;
    for_vectors(columns, [&](size_t i, size_t n) HWY_ATTR {
      VecF v = load(row + i, n);
      if (!first) {
        v = hn::Add(load(sums + i, n), v);
      } else if (accumulate) {
        v = hn::Add(load(to + i, n), v);
      }
      last ? store(v, to + i, n) : store(v, sums + i, n);
    });
  }
}

template <class T>
void add_rows(Flat out, const float* partial, std::int64_t count, bool accumulate) {
  T* to = static_cast<T*>(out.data);
  for_vectors(static_cast<size_t>(out.count), [&](size_t i, size_t n) HWY_ATTR {
    VecF sum = load(partial + i, n);
    for (std::int64_t r = 1; r < count; ++r) sum = hn::Add(sum, load(partial + r * out.count + i, n));
    if (accumulate) sum = hn::Add(load(to + i, n), sum);
    store(sum, to + i, n);
  });
}

}  // namespace

void RmsnormForward(Matrix y, float* rstd, Matrix sum, ConstMatrix x, ConstMatrix residual, ConstFlat weight,
                    float eps, std::int64_t begin, std::int64_t end) {
  const auto call = x.dtype == DType::bf16 ? norm_forward<bf16> : norm_forward<float>;
  call(y, rstd, sum, x, residual, weight, eps, begin, end);
}
void RmsnormBackward(Matrix dx, float* dweight_sum, ConstMatrix dy, ConstMatrix dresidual, ConstMatrix h,
                     ConstFlat weight, const float* rstd, std::int64_t begin, std::int64_t end) {
  const auto call = h.dtype == DType::bf16 ? norm_backward<bf16> : norm_backward<float>;
  call(dx, dweight_sum, dy, dresidual, h, weight, rstd, begin, end);
}
void SumRows(Flat out, const float* partial, std::int64_t count, bool accumulate) {
  const auto call = out.dtype == DType::bf16 ? add_rows<bf16> : add_rows<float>;
  call(out, partial, count, accumulate);
}
void Rope(Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine, const float* sine,
          bool inverse, std::int64_t begin, std::int64_t end) {
  const auto call = x.dtype == DType::bf16 ? rotate<bf16> : rotate<float>;
  call(x, static_cast<size_t>(head_size), sequence, cosine, sine, inverse, begin, end);
}
void SwigluForward(Matrix out, ConstMatrix gate_up, std::int64_t begin, std::int64_t end) {
  const auto call = out.dtype == DType::bf16 ? glu_forward<bf16> : glu_forward<float>;
  call(out, gate_up, begin, end);
}
void SwigluBackward(Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up, std::int64_t begin,
                    std::int64_t end) {
  const auto call = dout.dtype == DType::bf16 ? glu_backward<bf16> : glu_backward<float>;
  call(dgate_up, dout, gate_up, begin, end);
}
void GatherSum(void* to, DType to_dtype, ConstMatrix from, const std::int64_t* rows, std::int64_t count,
               bool accumulate, float* sums) {
  if (to_dtype == DType::bf16) {
    const auto call = from.dtype == DType::bf16 ? add_gathered<bf16, bf16> : add_gathered<bf16, float>;
    call(static_cast<bf16*>(to), from, rows, count, accumulate, sums);
  } else {
    const auto call = from.dtype == DType::bf16 ? add_gathered<float, bf16> : add_gathered<float, float>;
    call(static_cast<float*>(to), from, rows, count, accumulate, sums);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::cpu {

HWY_EXPORT(RmsnormForward);
HWY_EXPORT(RmsnormBackward);
HWY_EXPORT(SumRows);
HWY_EXPORT(Rope);
HWY_EXPORT(SwigluForward);
HWY_EXPORT(SwigluBackward);
HWY_EXPORT(GatherSum);

namespace kernels {

void rmsnorm_forward(Matrix y, float* rstd, Matrix sum, ConstMatrix x, ConstMatrix residual, ConstFlat weight,
                     float eps, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(RmsnormForward)(y, rstd, sum, x, residual, weight, eps, begin, end);
}
void rmsnorm_backward(Matrix dx, float* dweight_sum, ConstMatrix dy, ConstMatrix dresidual, ConstMatrix h,
                      ConstFlat weight, const float* rstd, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(RmsnormBackward)(dx, dweight_sum, dy, dresidual, h, weight, rstd, begin, end);
}
void sum_rows(Flat out, const float* partial, std::int64_t count, bool accumulate) {
  HWY_DYNAMIC_DISPATCH(SumRows)(out, partial, count, accumulate);
}
void rope(Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine, const float* sine,
          bool inverse, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(Rope)(x, head_size, sequence, cosine, sine, inverse, begin, end);
}
void swiglu_forward(Matrix out, ConstMatrix gate_up, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(SwigluForward)(out, gate_up, begin, end);
}
void swiglu_backward(Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up, std::int64_t begin,
                     std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(SwigluBackward)(dgate_up, dout, gate_up, begin, end);
}
void gather_sum(void* to, DType to_dtype, ConstMatrix from, const std::int64_t* rows, std::int64_t count,
                bool accumulate, float* sums) {
  HWY_DYNAMIC_DISPATCH(GatherSum)(to, to_dtype, from, rows, count, accumulate, sums);
}

}  // namespace kernels
}  // namespace strata::cpu
#endif
