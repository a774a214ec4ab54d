// Arithmetic intrinsics of CUDA C++ for the host compiler. Rounded forms (_rn) are never contracted into an
// fma.
#pragma once

#include <cuda_runtime.h>

#include <math.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace strata::emulation {

// Hides how `x` was made from the optimiser, so that no multiplication before it joins an addition after it.
inline float rounded(float x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}
inline double rounded(double x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}

inline float exp2_flushed(float x) {
  const float y = ::exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

template <typename To>
To to_integer(float rounded_value) {  // CUDA saturates and maps NaN to 0
  if (rounded_value != rounded_value) return To{0};
  constexpr To low = std::numeric_limits<To>::min();
  constexpr To high = std::numeric_limits<To>::max();
  if (static_cast<double>(rounded_value) <= static_cast<double>(low)) return low;
  if (static_cast<double>(rounded_value) >= static_cast<double>(high)) return high;
  return static_cast<To>(rounded_value);
}

}  // namespace strata::emulation

inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}

inline float __fadd_rn(float a, float b) {
  return strata::emulation::rounded(strata::emulation::rounded(a) + b);
}
inline float __fsub_rn(float a, float b) {
  return strata::emulation::rounded(strata::emulation::rounded(a) - b);
}
inline float __fmul_rn(float a, float b) {
  return strata::emulation::rounded(a * b);
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1.0f / a;
}
inline float __fsqrt_rn(float a) {
  return ::sqrtf(a);
}
inline float __frsqrt_rn(float a) {
  return static_cast<float>(1.0 / ::sqrt(static_cast<double>(a)));
}
inline float __fmaf_rn(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
inline double __dadd_rn(double a, double b) {
  return strata::emulation::rounded(strata::emulation::rounded(a) + b);
}
inline double __dmul_rn(double a, double b) {
  return strata::emulation::rounded(a * b);
}
inline double __fma_rn(double a, double b, double c) {
  return ::fma(a, b, c);
}

// Approximate on the GPU; here as exact as libm.
inline float rsqrtf(float x) {
  return 1.0f / ::sqrtf(x);
}
inline double rsqrt(double x) {
  return 1.0 / ::sqrt(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __saturatef(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}
// libc declares these names itself without exporting them, so only a macro can supply them.
#define __expf(x) ::expf(x)
#define __exp10f(x) ::exp10f(x)
#define __logf(x) ::logf(x)
#define __log2f(x) ::log2f(x)
#define __log10f(x) ::log10f(x)
#define __sinf(x) ::sinf(x)
#define __cosf(x) ::cosf(x)
#define __tanf(x) ::tanf(x)
#define __powf(x, y) ::powf(x, y)
#define __sincosf(x, s, c) ::sincosf(x, s, c)

inline int __float2int_rn(float x) {
  return strata::emulation::to_integer<int>(::nearbyintf(x));
}
inline int __float2int_rz(float x) {
  return strata::emulation::to_integer<int>(::truncf(x));
}
inline int __float2int_rd(float x) {
  return strata::emulation::to_integer<int>(::floorf(x));
}
inline int __float2int_ru(float x) {
  return strata::emulation::to_integer<int>(::ceilf(x));
}
inline unsigned __float2uint_rn(float x) {
  return strata::emulation::to_integer<unsigned>(::nearbyintf(x));
}
inline unsigned __float2uint_rz(float x) {
  return strata::emulation::to_integer<unsigned>(::truncf(x));
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
  return static_cast<float>(x);
}

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<Wide>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  shift &= 31;
  return shift == 0 ? high : high << shift | low >> (32 - shift);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  shift &= 31;
  return shift == 0 ? low : low >> shift | high << (32 - shift);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i) & 15;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;  // replicate the sign
    result |= byte << (8 * i);
  }
  return result;
}

// CUDA has min and max in the global namespace.
#define STRATA_EMULATED_MIN_MAX(T) \
  constexpr T min(T a, T b) {      \
    return b < a ? b : a;          \
  }                                \
  constexpr T max(T a, T b) {      \
    return a < b ? b : a;          \
  }
STRATA_EMULATED_MIN_MAX(int)
STRATA_EMULATED_MIN_MAX(unsigned)
STRATA_EMULATED_MIN_MAX(long)
STRATA_EMULATED_MIN_MAX(unsigned long)
STRATA_EMULATED_MIN_MAX(long long)
STRATA_EMULATED_MIN_MAX(unsigned long long)
#undef STRATA_EMULATED_MIN_MAX
inline float min(float a, float b) {
  return ::fminf(a, b);
}
inline float max(float a, float b) {
  return ::fmaxf(a, b);
}
inline double min(double a, double b) {
  return ::fmin(a, b);
}
inline double max(double a, double b) {
  return ::fmax(a, b);
}
