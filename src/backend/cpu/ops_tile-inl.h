// Matrix micro-kernel and packing, per instruction set; used by the packed GEMM and by attention.
//
// A product C (m, n) = A (m, k) B (k, n) is cut into tiles of kTileRows x tile_cols(). B is packed into
// panels: tile_cols() columns wide, k after k. A is packed into slivers of kTileRows rows, k after k, or read
// in place. Each element of C is one chain of additions over k, whatever the tile or the vector width.
#if defined(STRATA_OPS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_OPS_TILE_INL_H_
#undef STRATA_OPS_TILE_INL_H_
#else
#define STRATA_OPS_TILE_INL_H_
#endif

#include <algorithm>

#include "backend/cpu/ops_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {

// Two vectors wide; rows so that the accumulators, two vectors of B and one of A fit the registers: 16 of
// them, or 32 with AVX-512.
constexpr std::size_t kTileRows = HWY_TARGET <= HWY_AVX3 ? 12 : 6;
constexpr std::size_t kMaxTileCols = 2 * kMaxLanes;
HWY_INLINE std::size_t tile_cols() {
  return 2 * lanes();
}
constexpr std::size_t round_up(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}

// c (Rows, tile_cols()) (+)= a b; a(i, k) = a[i * a_row + k * a_k], b a packed panel.
template <std::size_t Rows>
HWY_INLINE void tile_product(const float* HWY_RESTRICT a, std::size_t a_row, std::size_t a_k,
                             const float* HWY_RESTRICT b, std::size_t k_count, float* HWY_RESTRICT c,
                             std::size_t c_stride, bool add) {
  const F32 d;
  const std::size_t n = lanes();
  VecF left[Rows], right[Rows];
  for (std::size_t i = 0; i < Rows; ++i) left[i] = right[i] = hn::Zero(d);
  for (std::size_t k = 0; k < k_count; ++k) {
    const VecF b_left = hn::LoadU(d, b), b_right = hn::LoadU(d, b + n);
    b += 2 * n;
    for (std::size_t i = 0; i < Rows; ++i) {
      const VecF x = hn::Set(d, a[i * a_row]);
      left[i] = hn::MulAdd(x, b_left, left[i]);
      right[i] = hn::MulAdd(x, b_right, right[i]);
    }
    a += a_k;
  }
  for (std::size_t i = 0; i < Rows; ++i) {
    float* to = c + i * c_stride;
    if (add) {
      left[i] = hn::Add(hn::LoadU(d, to), left[i]);
      right[i] = hn::Add(hn::LoadU(d, to + n), right[i]);
    }
    hn::StoreU(left[i], d, to);
    hn::StoreU(right[i], d, to + n);
  }
}

template <class T>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> load4(const T* p) {
  const hn::FixedTag<float, 4> d;
  if constexpr (sizeof(T) == 4) {
    return hn::LoadU(d, p);
  } else {
    const hn::FixedTag<std::uint16_t, 4> d16;
    const hn::FixedTag<std::uint32_t, 4> d32;
    const auto half = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p));
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, half)));
  }
}

// Four elements of up to four rows, as columns.
template <class T>
HWY_INLINE void transpose4(const T* from, std::size_t row_stride, std::size_t rows, float* to,
                           std::size_t to_stride) {
  const hn::FixedTag<float, 4> d;
  auto row = [&](std::size_t i) HWY_ATTR { return i < rows ? load4(from + i * row_stride) : hn::Zero(d); };
  const hn::FixedTag<double, 2> d2;
  const auto r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
  const auto a = hn::BitCast(d2, hn::InterleaveLower(d, r0, r1));  // 00 10 01 11
  const auto b = hn::BitCast(d2, hn::InterleaveLower(d, r2, r3));
  const auto e = hn::BitCast(d2, hn::InterleaveUpper(d, r0, r1));
  const auto f = hn::BitCast(d2, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d2, a, b)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d2, a, b)), d, to + to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d2, e, f)), d, to + 2 * to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d2, e, f)), d, to + 3 * to_stride);
}

// Packs `rows` <= width rows of `from` (rows, k_count) as columns: to[k * width + i] = from(i, k), zero for
// i >= rows. Writes up to 3 floats past the end.
template <class T>
HWY_INLINE void pack_transposed(const T* from, std::size_t stride, std::size_t rows, std::size_t k_count,
                                std::size_t width, float* to) {
  const std::size_t k4 = k_count / 4 * 4;
  // Groups of four rows from the last to the first: where width is not a multiple of four, a group spills
  // into the first rows of the next k, which a later group overwrites.
  for (std::size_t group = round_up(width, 4); group != 0;) {
    group -= 4;
    const std::size_t valid = rows > group ? std::min<std::size_t>(rows - group, 4) : 0;
    for (std::size_t k = 0; k < k4; k += 4) {
      transpose4(from + group * stride + k, stride, valid, to + k * width + group, width);
    }
  }
  for (std::size_t k = k4; k < k_count; ++k) {
    for (std::size_t i = 0; i < width; ++i) to[k * width + i] = i < rows ? widen(from[i * stride + k]) : 0.0f;
  }
}

// Packs rows k of `from` (k_count, cols <= width): to[k * width + j] = from(k, j), zero for j >= cols.
template <class T>
HWY_INLINE void pack_straight(const T* from, std::size_t stride, std::size_t k_count, std::size_t cols,
                              std::size_t width, float* to) {
  const std::size_t n = lanes();
  std::size_t k = 0;
  if (cols == width && width % n == 0) {
    for (; k < k_count; ++k) {
      for (std::size_t j = 0; j < width; j += n) store(load(from + k * stride + j), to + k * width + j);
    }
  } else if (cols == width) {
    // Whole groups of four: the last may read into the next row and spill into the next k, which is written
    // later.
    for (; k + 1 < k_count && stride >= round_up(width, 4); ++k) {
      for (std::size_t j = 0; j < width; j += 4) {
        hn::StoreU(load4(from + k * stride + j), hn::FixedTag<float, 4>(), to + k * width + j);
      }
    }
  }
  for (; k < k_count; ++k) {
    for (std::size_t j = 0; j < width; ++j) to[k * width + j] = j < cols ? widen(from[k * stride + j]) : 0.0f;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
