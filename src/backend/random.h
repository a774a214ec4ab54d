#pragma once
// Counter-based random numbers that are the same bits on every backend: Philox4x32-10, uniform 16-bit words
// for stochastic rounding, and normals by Box-Muller. Compiles for the host and under nvcc. Only operations
// that IEEE 754 rounds correctly are used (add, multiply, fused multiply-add, divide, square root), each one
// named, so that no compiler may contract or reassociate them; logarithm and sine are series of our own.
//
// Element e of a parameter draws from fixed places, so no mesh, thread count or vector width changes a draw:
//   normal:   block e/4 gives four words; words (0,1) make elements 0 and 1 of the block, words (2,3) the
//   others rounding: block e/8 gives eight 16-bit words; element e takes word (e mod 8)/2, its upper half
//   when e is odd
#include <cmath>
#include <cstdint>
#include <cstring>

#include "backend/random_key.h"

#if defined(__CUDACC__)
#define STRATA_HD __host__ __device__ __forceinline__
#else
#define STRATA_HD inline __attribute__((always_inline))
#endif

namespace strata {
namespace ieee {

#if defined(__CUDA_ARCH__)
STRATA_HD float mul(float a, float b) {
  return __fmul_rn(a, b);
}
STRATA_HD float add(float a, float b) {
  return __fadd_rn(a, b);
}
STRATA_HD float div(float a, float b) {
  return __fdiv_rn(a, b);
}
STRATA_HD float fma(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
STRATA_HD float sqrt(float a) {
  return __fsqrt_rn(a);
}
#else
STRATA_HD float mul(float a, float b) {
  return a * b;
}  // built with -ffp-contract=off
STRATA_HD float add(float a, float b) {
  return a + b;
}
STRATA_HD float div(float a, float b) {
  return a / b;
}
STRATA_HD float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
STRATA_HD float sqrt(float a) {
  return __builtin_sqrtf(a);
}
#endif

STRATA_HD std::uint32_t bits(float x) {
  std::uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
STRATA_HD float from_bits(std::uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

}  // namespace ieee

struct PhiloxBlock {
  std::uint32_t word[4];
};

// Philox4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, 2011).
STRATA_HD PhiloxBlock philox4x32(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                                 std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

STRATA_HD PhiloxBlock philox_block(RandomKey key, std::uint64_t block) {
  return philox4x32(static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                    static_cast<std::uint32_t>(key.step), static_cast<std::uint32_t>(key.step >> 32),
                    static_cast<std::uint32_t>(key.key), static_cast<std::uint32_t>(key.key >> 32));
}

// Natural logarithm of u in [2^-24, 1], relative error under 3e-7. u = m 2^e with m in [sqrt(1/2), sqrt(2)),
// log m = 2 atanh(s) with s = (m-1)/(m+1), |s| < 0.172, so five terms of the series are enough.
STRATA_HD float log_unit(float u) {
  const std::uint32_t shifted = ieee::bits(u) - 0x3f3504f3u;  // counts from sqrt(1/2)
  const std::int32_t e = static_cast<std::int32_t>(shifted) >> 23;
  const float m = ieee::from_bits((shifted & 0x007fffffu) + 0x3f3504f3u);
  const float f = ieee::add(m, -1.0f);
  const float s = ieee::div(f, ieee::add(m, 1.0f));
  const float z = ieee::mul(s, s);
  float p = ieee::fma(z, 0.111111111f, 0.142857143f);
  p = ieee::fma(z, p, 0.2f);
  p = ieee::fma(z, p, 0.333333333f);
  const float tail = ieee::mul(ieee::mul(s, z), p);  // atanh(s) - s
  const float log_m = ieee::mul(2.0f, ieee::add(s, tail));
  const float n = static_cast<float>(e);
  // ln 2 in two parts: the first has few enough bits for n * part to be exact
  return ieee::fma(n, 0.693359375f, ieee::fma(n, -2.12194440e-4f, log_m));
}

// Sine and cosine of 2 pi t / 2^24, t in [0, 2^24): the octant is cut off in integers, exactly.
STRATA_HD void sincos_turn(std::uint32_t t, float& sine, float& cosine) {
  const std::uint32_t quadrant = (t + 0x200000u) >> 22;  // 0 ... 4, nearest multiple of a quarter turn
  const std::int32_t rest = static_cast<std::int32_t>(t) - static_cast<std::int32_t>(quadrant << 22);
  const float x = ieee::mul(static_cast<float>(rest), 3.74507028e-7f);
  const float z = ieee::mul(x, x);
  float ps = ieee::fma(z, 2.75573192e-6f, -1.98412698e-4f);
  ps = ieee::fma(z, ps, 8.33333333e-3f);
  ps = ieee::fma(z, ps, -1.66666667e-1f);
  const float s = ieee::fma(ieee::mul(x, z), ps, x);
  float pc = ieee::fma(z, -2.75573192e-7f, 2.48015873e-5f);
  pc = ieee::fma(z, pc, -1.38888889e-3f);
  pc = ieee::fma(z, pc, 4.16666667e-2f);
  pc = ieee::fma(z, pc, -0.5f);
  const float c = ieee::fma(z, pc, 1.0f);
  const bool swap = (quadrant & 1u) != 0;
  const float a = swap ? c : s;
  const float b = swap ? s : c;
  const std::uint32_t sine_sign = (quadrant & 2u) << 30;
  const std::uint32_t cosine_sign = ((quadrant + 1u) & 2u) << 30;
  sine = ieee::from_bits(ieee::bits(a) ^ sine_sign);
  cosine = ieee::from_bits(ieee::bits(b) ^ cosine_sign);
}

// Two standard normals from two words: radius from 24 bits of a (never zero), angle from 24 bits of b.
STRATA_HD void normal_pair(std::uint32_t a, std::uint32_t b, float& first, float& second) {
  const float u =
      ieee::mul(static_cast<float>(static_cast<std::int32_t>((a >> 8) + 1u)), 5.9604644775390625e-8f);
  const float radius = ieee::sqrt(ieee::mul(-2.0f, log_unit(u)));
  float sine, cosine;
  sincos_turn(b >> 8, sine, cosine);
  first = ieee::mul(radius, cosine);
  second = ieee::mul(radius, sine);
}

STRATA_HD float normal(RandomKey key, std::uint64_t element) {
  const PhiloxBlock block = philox_block(key, element >> 2);
  const bool upper = (element & 2u) != 0;
  float first, second;
  normal_pair(upper ? block.word[2] : block.word[0], upper ? block.word[3] : block.word[1], first, second);
  return (element & 1u) != 0 ? second : first;
}

STRATA_HD std::uint32_t rounding_word(const PhiloxBlock& block, std::uint32_t element_in_block) {
  const std::uint32_t word = block.word[element_in_block >> 1];
  return (element_in_block & 1u) != 0 ? word >> 16 : word & 0xffffu;
}

STRATA_HD std::uint32_t rounding_word(RandomKey key, std::uint64_t element) {
  return rounding_word(philox_block(key, element >> 3), static_cast<std::uint32_t>(element & 7u));
}

// bf16 bits of x rounded up with the probability of its distance to the bf16 below (in magnitude). word is
// uniform in [0, 2^16). Exact values stay; infinity stays; NaN stays NaN.
STRATA_HD std::uint16_t stochastic_bf16_bits(float x, std::uint32_t word) {
  const std::uint32_t u = ieee::bits(x);
  const std::uint32_t rounded = (u + word) >> 16;
  const std::uint32_t special = (u >> 16) | ((u & 0x007fffffu) != 0 ? 0x0040u : 0u);
  return static_cast<std::uint16_t>((u & 0x7f800000u) == 0x7f800000u ? special : rounded);
}

}  // namespace strata
