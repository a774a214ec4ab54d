#include "backend/cpu/gemm_packed.h"

#include "backend/cpu/ops_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm_packed.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/ops_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace {

// A panel of B (kDepth x two vectors) fits in half of a first-level cache; kRows x kDepth of A in half of a
// second.
constexpr std::size_t kDepth = 256, kRows = 192;

struct Block {
  std::size_t row0, col0, rows, cols;
};

template <class T>
void pack_b(const GemmCall& call, const Block& block, std::size_t k0, std::size_t depth, float* to) {
  const auto* b = static_cast<const T*>(call.b.data);
  const auto stride = static_cast<std::size_t>(call.b.stride);
  const std::size_t width = tile_cols();
  for (std::size_t j = 0; j < block.cols; j += width, to += width * depth) {
    const std::size_t cols = std::min(width, block.cols - j);
    if (call.transpose_b) {
      pack_transposed(b + (block.col0 + j) * stride + k0, stride, cols, depth, width, to);
    } else {
      pack_straight(b + k0 * stride + block.col0 + j, stride, depth, cols, width, to);
    }
  }
}

template <class T>
void pack_a(const GemmCall& call, const Block& block, std::size_t i0, std::size_t rows, std::size_t k0,
            std::size_t depth, float* to) {
  const auto* a = static_cast<const T*>(call.a.data);
  const auto stride = static_cast<std::size_t>(call.a.stride);
  for (std::size_t i = 0; i < rows; i += kTileRows, to += kTileRows * depth) {
    const std::size_t row = block.row0 + i0 + i, valid = std::min(kTileRows, rows - i);
    if (call.transpose_a) {
      pack_straight(a + k0 * stride + row, stride, depth, valid, kTileRows, to);
    } else {
      pack_transposed(a + row * stride + k0, stride, valid, depth, kTileRows, to);
    }
  }
}

// c (rows, cols) (+)= the packed operands; c is fp32.
void multiply(const float* a, const float* b, std::size_t rows, std::size_t cols, std::size_t depth, float* c,
              std::size_t c_stride, bool add) {
  const std::size_t width = tile_cols();
  for (std::size_t j = 0; j < cols; j += width) {
    for (std::size_t i = 0; i < rows; i += kTileRows) {
      const float* sliver = a + i * depth;
      const float* panel = b + j * depth;
      float* to = c + i * c_stride + j;
      if (i + kTileRows <= rows && j + width <= cols) {
        tile_product<kTileRows>(sliver, 1, kTileRows, panel, depth, to, c_stride, add);
        continue;
      }
      alignas(64) float tile[kTileRows * kMaxTileCols];
      tile_product<kTileRows>(sliver, 1, kTileRows, panel, depth, tile, width, false);
      for (std::size_t y = 0; y < std::min(kTileRows, rows - i); ++y) {
        for (std::size_t x = 0; x < std::min(width, cols - j); ++x) {
          to[y * c_stride + x] = add ? to[y * c_stride + x] + tile[y * width + x] : tile[y * width + x];
        }
      }
    }
  }
}

// c = or += sums, rounded once.
void finish(const GemmCall& call, const Block& block, const float* sums, std::size_t stride) {
  auto* c =
      static_cast<bf16*>(call.c.data) + block.row0 * static_cast<std::size_t>(call.c.stride) + block.col0;
  for (std::size_t i = 0; i < block.rows; ++i, c += call.c.stride, sums += stride) {
    for_vectors(block.cols, [&](std::size_t j, std::size_t n) HWY_ATTR {
      VecF v = load(sums + j, n);
      if (call.accumulate) v = hn::Add(load(c + j, n), v);
      store(v, c + j, n);
    });
  }
}

}  // namespace

std::size_t ScratchFloats(const GemmCall& call) {
  const auto cols = static_cast<std::size_t>(std::min(call.n(), kPackedBlockCols));
  const auto rows = static_cast<std::size_t>(std::min(call.m(), kPackedBlockRows));
  const std::size_t width = round_up(cols, kMaxTileCols);
  const std::size_t depth = std::min<std::size_t>(static_cast<std::size_t>(call.k()), kDepth);
  const std::size_t sums = call.c.dtype == DType::bf16 ? round_up(rows, kTileRows) * width : 0;
  return sums + width * depth + round_up(std::min(rows, kRows), kTileRows) * depth + 16;
}

void PackedBlock(const GemmCall& call, std::int64_t row0, std::int64_t col0, float* scratch) {
  const Block block{static_cast<std::size_t>(row0), static_cast<std::size_t>(col0),
                    static_cast<std::size_t>(std::min(call.m() - row0, kPackedBlockRows)),
                    static_cast<std::size_t>(std::min(call.n() - col0, kPackedBlockCols))};
  const auto k_count = static_cast<std::size_t>(call.k());
  const bool narrow = call.c.dtype == DType::bf16, operands_narrow = call.a.dtype == DType::bf16;
  const std::size_t width = round_up(block.cols, tile_cols());
  float* b = scratch;
  float* sums = b + width * std::min(k_count, kDepth);
  const std::size_t sums_stride = narrow ? width : static_cast<std::size_t>(call.c.stride);
  float* a = sums;
  if (narrow) {
    a += round_up(block.rows, kTileRows) * width;
  } else {
    sums = static_cast<float*>(call.c.data) + block.row0 * sums_stride + block.col0;
  }
  for (std::size_t k0 = 0; k0 < k_count; k0 += kDepth) {
    const std::size_t depth = std::min(kDepth, k_count - k0);
    operands_narrow ? pack_b<bf16>(call, block, k0, depth, b) : pack_b<float>(call, block, k0, depth, b);
    for (std::size_t i0 = 0; i0 < block.rows; i0 += kRows) {
      const std::size_t rows = std::min(kRows, block.rows - i0);
      operands_narrow ? pack_a<bf16>(call, block, i0, rows, k0, depth, a)
                      : pack_a<float>(call, block, i0, rows, k0, depth, a);
      multiply(a, b, rows, block.cols, depth, sums + i0 * sums_stride, sums_stride,
               k0 > 0 || (!narrow && call.accumulate));
    }
  }
  if (narrow) finish(call, block, sums, sums_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::cpu {

HWY_EXPORT(ScratchFloats);
HWY_EXPORT(PackedBlock);

std::size_t packed_scratch_floats(const GemmCall& call) {
  return HWY_DYNAMIC_DISPATCH(ScratchFloats)(call);
}
void packed_block(const GemmCall& call, std::int64_t row0, std::int64_t col0, float* scratch) {
  HWY_DYNAMIC_DISPATCH(PackedBlock)(call, row0, col0, scratch);
}

}  // namespace strata::cpu
#endif
