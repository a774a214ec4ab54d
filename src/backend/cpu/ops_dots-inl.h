// Matrix micro-kernel and packing on bf16 dot products (AVX-512 bf16), beside the fp32 ones of
// ops_tile-inl.h.
//
// A *pair* is a 32-bit word of two bf16 that are neighbours in k, the even one in the low half; one
// instruction multiplies sixteen pairs with sixteen pairs and adds both products to sixteen fp32 sums. It
// takes subnormal inputs as zero. Panels of B are kDotCols columns wide, pair of k after pair of k.
//
// Only the AVX-512 dialect of the kernels has this; has_dots() tells at run time whether the CPU does too.
#if defined(STRATA_OPS_DOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_OPS_DOTS_INL_H_
#undef STRATA_OPS_DOTS_INL_H_
#else
#define STRATA_OPS_DOTS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "backend/cpu/ops_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
HWY_INLINE bool has_dots() {
#if HWY_TARGET == HWY_AVX3
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}
}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_TARGET == HWY_AVX3
#include <immintrin.h>

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
namespace strata::cpu {
namespace HWY_NAMESPACE {

using Pair = std::uint32_t;
constexpr std::size_t kDotRows = kTileRows, kDotCols = 32;

HWY_INLINE __m512bh broadcast_pair(const bf16* at) {
  int pair;
  std::memcpy(&pair, at, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// c (Rows, kDotCols) (+)= a b; row i of a has its k-th pair at a + i * a_row + k * a_k, b is a panel.
template <std::size_t Rows>
HWY_INLINE void tile_dots(const bf16* HWY_RESTRICT a, std::size_t a_row, std::size_t a_k,
                          const Pair* HWY_RESTRICT b, std::size_t pairs, float* HWY_RESTRICT c,
                          std::size_t c_stride, bool add) {
  constexpr std::size_t kAhead = 8 * kDotCols;  // a panel comes from the second-level cache
  __m512 left[Rows], right[Rows];
  for (std::size_t i = 0; i < Rows; ++i) left[i] = right[i] = _mm512_setzero_ps();
  for (std::size_t k = 0; k < pairs; ++k) {
    const auto b_left = (__m512bh)_mm512_loadu_si512(b), b_right = (__m512bh)_mm512_loadu_si512(b + 16);
    b += kDotCols;
    _mm_prefetch(reinterpret_cast<const char*>(b + kAhead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(b + kAhead + 16), _MM_HINT_T0);
    for (std::size_t i = 0; i < Rows; ++i) {
      const __m512bh x = broadcast_pair(a + i * a_row);
      left[i] = _mm512_dpbf16_ps(left[i], x, b_left);
      right[i] = _mm512_dpbf16_ps(right[i], x, b_right);
    }
    a += a_k;
  }
  for (std::size_t i = 0; i < Rows; ++i) {
    float* to = c + i * c_stride;
    if (add) {
      left[i] = _mm512_add_ps(_mm512_loadu_ps(to), left[i]);
      right[i] = _mm512_add_ps(_mm512_loadu_ps(to + 16), right[i]);
    }
    _mm512_storeu_ps(to, left[i]);
    _mm512_storeu_ps(to + 16, right[i]);
  }
}

// Sixteen words and sixteen words taken in turn: {low 0, high 0, low 1, high 1, ...} as bf16.
HWY_INLINE __m512i in_turn(__m512i low_then_high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, low_then_high);
}
// Two vectors of fp32 rounded to bf16: `low` in the lower half.
HWY_INLINE __m512i to_bf16_pair(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Sixteen rows of sixteen words to sixteen columns.
HWY_INLINE void transpose_words(__m512i row[16]) {
  __m512i t[16];
  for (std::size_t i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  // four[4 g + c]: in its 128-bit lane l, word 4 l + c of rows 4 g ... 4 g + 3
  __m512i four[16];
  for (std::size_t i = 0; i < 16; i += 4) {
    four[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    four[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    four[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    four[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // lanes 0 and 2, or 1 and 3, of both operands
  for (std::size_t c = 0; c < 4; ++c) {
    const __m512i upper_even = _mm512_shuffle_i32x4(four[c], four[4 + c], kEven);
    const __m512i upper_odd = _mm512_shuffle_i32x4(four[c], four[4 + c], kOdd);
    const __m512i lower_even = _mm512_shuffle_i32x4(four[8 + c], four[12 + c], kEven);
    const __m512i lower_odd = _mm512_shuffle_i32x4(four[8 + c], four[12 + c], kOdd);
    row[c] = _mm512_shuffle_i32x4(upper_even, lower_even, kEven);
    row[4 + c] = _mm512_shuffle_i32x4(upper_odd, lower_odd, kEven);
    row[8 + c] = _mm512_shuffle_i32x4(upper_even, lower_even, kOdd);
    row[12 + c] = _mm512_shuffle_i32x4(upper_odd, lower_odd, kOdd);
  }
}

// The first `count` of 32 elements, all when there are more.
HWY_INLINE __mmask32 first_elements(std::size_t count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}

// Rows as the columns of B: to[w * kDotCols + r] = the w-th pair of row r, zero for r >= rows (at most
// kDotCols) and past the row's `depth` elements.
HWY_INLINE void pack_pairs_transposed(const bf16* from, std::size_t stride, std::size_t rows,
                                      std::size_t depth, Pair* to) {
  for (std::size_t k = 0; k < depth; k += 32) {
    const __mmask32 mask = first_elements(depth - k);
    const std::size_t pairs = std::min<std::size_t>(16, (depth - k + 1) / 2);
    for (std::size_t r = 0; r < kDotCols; r += 16) {
      __m512i row[16];
      for (std::size_t i = 0; i < 16; ++i) {
        row[i] = r + i < rows ? _mm512_maskz_loadu_epi16(mask, from + (r + i) * stride + k)
                              : _mm512_setzero_si512();
      }
      transpose_words(row);
      for (std::size_t w = 0; w < pairs; ++w) _mm512_storeu_si512(to + (k / 2 + w) * kDotCols + r, row[w]);
    }
  }
}

// Row r of `rows`, from column c on, will be read soon. Walks over short pieces of far rows are more than the
// hardware foresees.
HWY_INLINE void prefetch_row(const bf16* from, std::size_t stride, std::size_t c, std::size_t r,
                             std::size_t rows) {
  if (r < rows) _mm_prefetch(reinterpret_cast<const char*>(from + r * stride + c), _MM_HINT_T0);
}

// Rows as the depth of B: to[k * kDotCols + j] = the pair of rows 2k and 2k + 1 in column j, zero for
// j >= cols (at most kDotCols) and for a row past the last.
HWY_INLINE void pack_pairs_straight(const bf16* from, std::size_t stride, std::size_t rows, std::size_t cols,
                                    Pair* to) {
  const __mmask32 mask = first_elements(cols);
  constexpr std::size_t kAhead = 16;
  for (std::size_t k = 0; k < rows; k += 2, to += kDotCols) {
    prefetch_row(from, stride, 0, k + kAhead, rows);
    prefetch_row(from, stride, 0, k + kAhead + 1, rows);
    const __m512i even = _mm512_maskz_loadu_epi16(mask, from + k * stride);
    const __m512i odd =
        k + 1 < rows ? _mm512_maskz_loadu_epi16(mask, from + (k + 1) * stride) : _mm512_setzero_si512();
    const __m512i first = _mm512_inserti64x4(even, _mm512_castsi512_si256(odd), 1);
    const __m512i second = _mm512_inserti64x4(odd, _mm512_extracti64x4_epi64(even, 1), 0);
    _mm512_storeu_si512(to, in_turn(first));
    _mm512_storeu_si512(to + 16, in_turn(second));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_POP_ATTRIBUTES
#endif

#endif  // include guard of this target
