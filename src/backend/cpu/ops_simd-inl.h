// Per-target helpers of the kernels: loads and stores of fp32 and bf16 as fp32 vectors, loops with tails,
// exponential. Included once for each instruction set, after hwy/highway.h (so no ordinary include guard).
#if defined(STRATA_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_OPS_SIMD_INL_H_
#undef STRATA_OPS_SIMD_INL_H_
#else
#define STRATA_OPS_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "base/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using I32 = hn::Rebind<std::int32_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using VecF = hn::Vec<F32>;
constexpr std::size_t kMaxLanes = hn::MaxLanes(F32());

HWY_INLINE std::size_t lanes() {
  return hn::Lanes(F32());
}

HWY_INLINE float widen(float x) {
  return x;
}
HWY_INLINE float widen(bf16 x) {
  return to_float(x);
}

HWY_INLINE VecF load(const float* p) {
  return hn::LoadU(F32(), p);
}
HWY_INLINE VecF load(const bf16* p) {
  const auto half = hn::LoadU(U16(), reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), half)));
}

// bf16 bits (in the low half of each lane), nearest even, NaN stays NaN: as to_bf16.
HWY_INLINE hn::Vec<U32> bf16_bits(VecF v) {
  const U32 du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(u, hn::Set(du, 0x7fffu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(du, 0x0040u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

HWY_INLINE void store(VecF v, float* p) {
  hn::StoreU(v, F32(), p);
}
HWY_INLINE void store(VecF v, bf16* p) {
  const auto narrow = hn::DemoteTo(U16(), hn::BitCast(I32(), bf16_bits(v)));
  hn::StoreU(narrow, U16(), reinterpret_cast<std::uint16_t*>(p));
}

// v as it would come back from memory of type T.
template <class T>
HWY_INLINE VecF rounded_to(VecF v) {
  if constexpr (sizeof(T) == sizeof(bf16)) {
    return hn::BitCast(F32(), hn::ShiftLeft<16>(bf16_bits(v)));
  } else {
    return v;
  }
}

// The first n <= lanes() elements; the other lanes are zero. Never touches memory past them.
template <class T>
HWY_INLINE VecF load(const T* p, std::size_t n) {
  if (n == lanes()) return load(p);
  alignas(64) T all[kMaxLanes] = {};
  std::memcpy(all, p, n * sizeof(T));
  return load(all);
}
template <class T>
HWY_INLINE void store(VecF v, T* p, std::size_t n) {
  if (n == lanes()) {
    store(v, p);
  } else {
    alignas(64) T all[kMaxLanes];
    store(v, all);
    std::memcpy(p, all, n * sizeof(T));
  }
}

// Calls f(first, n) for whole vectors and then for the rest, 0 < n <= lanes().
template <class F>
HWY_INLINE void for_vectors(std::size_t count, F&& f) {
  const std::size_t whole = lanes();
  std::size_t i = 0;
  for (; i + whole <= count; i += whole) f(i, whole);
  if (i < count) f(i, count - i);
}

HWY_INLINE float sum_of_lanes(VecF v) {
  return hn::GetLane(hn::SumOfLanes(F32(), v));
}
HWY_INLINE float max_of_lanes(VecF v) {
  return hn::GetLane(hn::MaxOfLanes(F32(), v));
}

// exp(x) within 2 units in the last place for x in [-87.3, 88.3]; 0 below, exp(88.3) above, NaN for NaN.
// x = n ln 2 + r with |r| <= ln(2)/2; the polynomial is a degree-6 fit of exp on that interval, and adding
// 1.5 2^23 leaves n in the low bits of the sum.
HWY_INLINE VecF exp(VecF x) {
  const F32 d;
  const U32 du;
  const auto low = hn::Set(d, -87.3f);
  const auto underflow = hn::Lt(x, low);
  // Operand order matters: x86 minimum and maximum return the second operand when one is NaN.
  x = hn::Min(hn::Set(d, 88.3f), hn::Max(low, x));
  const auto magic = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const auto n = hn::Sub(shifted, magic);
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  auto p = hn::MulAdd(r, hn::Set(d, 0.00138144669f), hn::Set(d, 0.0083687807f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416683942f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.166665201f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.499999934f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent = hn::Add(hn::ShiftLeft<23>(hn::BitCast(du, shifted)), hn::Set(du, 127u << 23));
  return hn::IfThenZeroElse(underflow, hn::Mul(p, hn::BitCast(d, exponent)));
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
