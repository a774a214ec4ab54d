#include "backend/cpu/gemm_dots.h"

#include <algorithm>

#include "backend/cpu/ops_targets.h"
#include "base/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm_dots.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/ops_dots-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
#ifndef STRATA_GEMM_DOTS_CONSTANTS
#define STRATA_GEMM_DOTS_CONSTANTS
constexpr std::int64_t kPackRows = 64;  // of b in one task, where it is not transposed
#endif
namespace HWY_NAMESPACE {
bool HasDots() {
  return has_dots();
}
#if HWY_TARGET != HWY_AVX3
void DotsPack(const GemmCall&, const DotsPlan&, std::int64_t, std::int64_t, void*) {}
void DotsBand(const GemmCall&, const DotsPlan&, std::int64_t, std::int64_t, const void*, void*) {
  throw InternalError("a product on bf16 dots was started on a CPU without them -> report this");
}
#endif
}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_TARGET == HWY_AVX3
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace {

using std::size_t;
// Pairs of k that a tile adds up before its sums go back to memory: a panel of B that deep is 32 KiB.
constexpr size_t kDepthPairs = 256;

// A band's rows of a, as tile_dots reads them: sliver s starts at data + s * sliver.
struct LeftRows {
  const bf16* data;
  size_t sliver, row, k;
  const bf16* ragged;  // the last, incomplete sliver: rows of stride ragged_row; null when there is none
  size_t ragged_row;
};

void copy_left(const bf16* from, size_t stride, size_t rows, size_t depth, size_t to_stride, bf16* to) {
  for (size_t r = 0; r < round_up(rows, kDotRows); ++r, to += to_stride) {
    const size_t count = r < rows ? depth : 0;
    if (count > 0) std::memcpy(to, from + r * stride, count * sizeof(bf16));
    std::memset(to + count, 0, (to_stride - count) * sizeof(bf16));
  }
}

// Columns of `from` (depth, rows) as slivers: to[s * sliver + k * kDotRows + i] = the pair of rows 2k and
// 2k + 1 in column s * kDotRows + i. A few rows at a time, so that their lines are read once. Writes up to 4
// words past the end of a sliver.
void pack_left(const bf16* from, size_t stride, size_t rows, size_t depth, size_t sliver, Pair* to) {
  static_assert(kDotRows == 12);
  constexpr size_t kAtOnce = 16;
  for (size_t k0 = 0; k0 < depth; k0 += kAtOnce) {
    for (size_t s = 0; s < rows; s += kDotRows) {
      const auto mask = static_cast<__mmask16>((1u << std::min(kDotRows, rows - s)) - 1);
      Pair* at = to + s / kDotRows * sliver + k0 / 2 * kDotRows;
      for (size_t k = k0; k < std::min(depth, k0 + kAtOnce); k += 2, at += kDotRows) {
        prefetch_row(from, stride, s, k + kAtOnce, depth);
        prefetch_row(from, stride, s, k + kAtOnce + 1, depth);
        const __m256i even = _mm256_maskz_loadu_epi16(mask, from + k * stride + s);
        const __m256i odd = k + 1 < depth ? _mm256_maskz_loadu_epi16(mask, from + (k + 1) * stride + s)
                                          : _mm256_setzero_si256();
        _mm512_storeu_si512(at, in_turn(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1)));
      }
    }
  }
}

LeftRows left_rows(const GemmCall& call, const DotsPlan& plan, size_t row, size_t rows, bf16* scratch) {
  const auto* a = static_cast<const bf16*>(call.a.data);
  const auto stride = static_cast<size_t>(call.a.stride), depth = static_cast<size_t>(call.k());
  const auto copied = static_cast<size_t>(plan.left_stride);
  switch (plan.left) {
    case DotsPlan::Left::packed:
      pack_left(a + row, stride, rows, depth, static_cast<size_t>(plan.sliver),
                reinterpret_cast<Pair*>(scratch));
      return {scratch, 2 * static_cast<size_t>(plan.sliver), 2, 2 * kDotRows, nullptr, 0};
    case DotsPlan::Left::copied:
      copy_left(a + row * stride, stride, rows, depth, copied, scratch);
      return {scratch, kDotRows * copied, copied, 2, nullptr, 0};
    case DotsPlan::Left::in_place:
      break;
  }
  const size_t whole = rows / kDotRows * kDotRows;
  if (whole < rows) copy_left(a + (row + whole) * stride, stride, rows - whole, depth, copied, scratch);
  return {a + row * stride, kDotRows * stride, stride, 2, whole < rows ? scratch : nullptr, copied};
}

// c (rows, cols) = or += sums (rows, kDotCols), rounded once.
template <class T>
void finish(T* c, size_t stride, size_t rows, size_t cols, bool accumulate, const float* sums) {
  for (size_t i = 0; i < rows; ++i, c += stride, sums += kDotCols) {
    for_vectors(cols, [&](size_t j, size_t n) HWY_ATTR {
      VecF v = load(sums + j, n);
      if (accumulate) v = hn::Add(load(c + j, n), v);
      store(v, c + j, n);
    });
  }
}

// The lines of kDotRows rows that will be read, or written, when the present tile is done.
HWY_INLINE void prefetch_rows(const void* first, size_t row_bytes, size_t bytes) {
  const auto* row = static_cast<const char*>(first);
  for (size_t i = 0; i < kDotRows; ++i, row += row_bytes) {
    for (size_t at = 0; at < bytes; at += 64) _mm_prefetch(row + at, _MM_HINT_T0);
  }
}

// A band against a panel, over all of k. fresh: the band lies in memory as it was left long ago.
void multiply(const GemmCall& call, const LeftRows& left, size_t rows, const Pair* panel, size_t pairs,
              size_t row, size_t col, size_t cols, bool fresh, float* sums) {
  const auto stride = static_cast<size_t>(call.c.stride);
  float* direct = call.c.dtype == DType::f32 && cols == kDotCols
                      ? static_cast<float*>(call.c.data) + row * stride + col
                      : nullptr;
  const size_t whole = rows / kDotRows * kDotRows;
  for (size_t p = 0; p < pairs; p += kDepthPairs) {
    const size_t depth = std::min(kDepthPairs, pairs - p);
    const Pair* b = panel + p * kDotCols;
    for (size_t i = 0; i < rows; i += kDotRows) {
      const bool last = i == whole;  // the incomplete sliver
      const bool own = last && left.ragged != nullptr;
      const bf16* a = own ? left.ragged + 2 * p : left.data + i / kDotRows * left.sliver + p * left.k;
      const size_t a_row = own ? left.ragged_row : left.row;
      if (!last && p == 0) {
        prefetch_rows(call.c.at(static_cast<std::int64_t>(row + i), static_cast<std::int64_t>(col)),
                      stride * size_of(call.c.dtype), kDotCols * size_of(call.c.dtype));
      }
      if (fresh && i + 2 * kDotRows <= rows) {
        prefetch_rows(a + left.sliver, left.row * sizeof(bf16), 2 * depth * sizeof(bf16));
      }
      if (direct != nullptr && !last) {
        tile_dots<kDotRows>(a, a_row, left.k, b, depth, direct + i * stride, stride,
                            p > 0 || call.accumulate);
      } else {
        tile_dots<kDotRows>(a, a_row, left.k, b, depth, sums + i * kDotCols, kDotCols, p > 0);
      }
    }
  }
  const size_t first = direct != nullptr ? whole : 0;
  const size_t at = (row + first) * stride + col;
  if (call.c.dtype == DType::bf16) {
    finish(static_cast<bf16*>(call.c.data) + at, stride, rows - first, cols, call.accumulate,
           sums + first * kDotCols);
  } else {
    finish(static_cast<float*>(call.c.data) + at, stride, rows - first, cols, call.accumulate,
           sums + first * kDotCols);
  }
}

}  // namespace

void DotsPack(const GemmCall& call, const DotsPlan& plan, std::int64_t col0, std::int64_t task, void* right) {
  const auto* b = static_cast<const bf16*>(call.b.data);
  const auto stride = static_cast<size_t>(call.b.stride), depth = static_cast<size_t>(call.k());
  const auto first = static_cast<size_t>(col0), pairs = static_cast<size_t>(plan.pairs);
  const auto cols = static_cast<size_t>(std::min(plan.cols, call.n() - col0));
  auto* to = static_cast<Pair*>(right);
  if (call.transpose_b) {  // a task is a panel
    const size_t j = static_cast<size_t>(task) * kDotCols;
    pack_pairs_transposed(b + (first + j) * stride, stride, std::min(kDotCols, cols - j), depth,
                          to + j * pairs);
    return;
  }
  const size_t k0 = static_cast<size_t>(task) * kPackRows, rows = std::min<size_t>(kPackRows, depth - k0);
  for (size_t j = 0; j < cols; j += kDotCols) {
    pack_pairs_straight(b + k0 * stride + first + j, stride, rows, std::min(kDotCols, cols - j),
                        to + j * pairs + k0 / 2 * kDotCols);
  }
}

void DotsBand(const GemmCall& call, const DotsPlan& plan, std::int64_t row0, std::int64_t col0,
              const void* right, void* scratch) {
  auto* left = static_cast<bf16*>(scratch);
  auto* sums = reinterpret_cast<float*>(static_cast<char*>(scratch) + plan.left_bytes);
  const auto pairs = static_cast<size_t>(plan.pairs), row = static_cast<size_t>(row0);
  const auto rows = static_cast<size_t>(std::min(plan.band, call.m() - row0));
  const auto cols = static_cast<size_t>(std::min(plan.cols, call.n() - col0));
  const LeftRows a = left_rows(call, plan, row, rows, left);
  for (size_t j = 0; j < cols; j += kDotCols) {
    multiply(call, a, rows, static_cast<const Pair*>(right) + j * pairs, pairs, row,
             static_cast<size_t>(col0) + j, std::min(kDotCols, cols - j),
             j == 0 && plan.left == DotsPlan::Left::in_place, sums);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_POP_ATTRIBUTES
#endif

#if HWY_ONCE
namespace strata::cpu {

HWY_EXPORT(HasDots);
HWY_EXPORT(DotsPack);
HWY_EXPORT(DotsBand);

bool cpu_has_bf16_dots() {
  return HWY_DYNAMIC_DISPATCH(HasDots)();
}

namespace {

constexpr std::int64_t kTile = 12, kPanel = 32;
// What is packed of b at once, at most (unless kMinimumPanels are more), and a band's share of a.
constexpr std::int64_t kRightBytes = 8 << 20, kLeftBytes = 512 << 10, kMinimumPanels = 4;

std::int64_t divide_up(std::int64_t n, std::int64_t by) {
  return (n + by - 1) / by;
}
std::int64_t multiple_up(std::int64_t n, std::int64_t of) {
  return divide_up(n, of) * of;
}
// n in equal parts of at most `most`, each a multiple of `of`.
std::int64_t equal_parts(std::int64_t n, std::int64_t most, std::int64_t of) {
  return multiple_up(divide_up(n, divide_up(n, most)), of);
}

}  // namespace

DotsPlan::DotsPlan(const GemmCall& call) {
  const std::int64_t m = std::max<std::int64_t>(call.m(), 1), n = std::max<std::int64_t>(call.n(), 1);
  pairs = divide_up(call.k(), 2);
  const std::int64_t depth_bytes = std::max<std::int64_t>(pairs, 1) * 4;
  cols = equal_parts(n, std::max(kRightBytes / depth_bytes / kPanel, kMinimumPanels) * kPanel, kPanel);
  col_blocks = divide_up(n, cols);
  band = equal_parts(m, std::max(kLeftBytes / depth_bytes / kTile, std::int64_t{2}) * kTile, kTile);
  bands = divide_up(m, band);
  left_stride = multiple_up(2 * pairs, kPanel) + kPanel;
  sliver = kTile * pairs + 16;  // apart by no power of two
  const bool share_lines = call.a.stride * 2 % 4096 == 0;
  left = call.transpose_a ? Left::packed : call.k() % 2 != 0 || share_lines ? Left::copied : Left::in_place;
  const std::int64_t copied_rows = left == Left::in_place ? kTile : band;
  right_bytes = static_cast<std::size_t>(multiple_up(cols * depth_bytes, 64));
  left_bytes = static_cast<std::size_t>(
      multiple_up(left == Left::packed ? band / kTile * sliver * 4 : copied_rows * left_stride * 2, 64));
  sums_bytes = static_cast<std::size_t>(band * kPanel) * sizeof(float);
}

std::int64_t dots_pack_tasks(const GemmCall& call, const DotsPlan& plan, std::int64_t col0) {
  return call.transpose_b ? divide_up(std::min(plan.cols, call.n() - col0), kPanel)
                          : divide_up(call.k(), kPackRows);
}
void dots_pack(const GemmCall& call, const DotsPlan& plan, std::int64_t col0, std::int64_t task,
               void* right) {
  HWY_DYNAMIC_DISPATCH(DotsPack)(call, plan, col0, task, right);
}
void dots_band(const GemmCall& call, const DotsPlan& plan, std::int64_t row0, std::int64_t col0,
               const void* right, void* scratch) {
  HWY_DYNAMIC_DISPATCH(DotsBand)(call, plan, row0, col0, right, scratch);
}

}  // namespace strata::cpu
#endif
