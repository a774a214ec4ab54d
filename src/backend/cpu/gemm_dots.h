#pragma once
// The dots product of gemm.h: bf16 operands multiplied pair by pair, fp32 sums; c is fp32 or bf16.
//
// b is packed once, into panels of all K (a wide b in blocks of columns, one after the other). Then bands of
// rows of c, whose part of a fits a second-level cache, meet the panels one by one. The sums of a band and a
// panel stay in the nearest caches over all of K, and are rounded to c when they are complete.
#include <cstddef>
#include <cstdint>

#include "backend/cpu/gemm.h"

namespace strata::cpu {

// True when the CPU has bf16 dot products (and the kernels' AVX-512 dialect is not disabled).
bool cpu_has_bf16_dots();

// How a product is cut: from the shape and the strides alone.
struct DotsPlan {
  explicit DotsPlan(const GemmCall& call);

  // How a reaches the kernel.
  enum class Left : std::uint8_t {
    in_place,  // rows as they lie in memory
    copied,    // rows copied: of odd length, or so far apart that they would share the lines of the cache
    packed,    // transposed: slivers of rows, pair after pair
  };

  std::int64_t pairs;             // of k
  std::int64_t cols, col_blocks;  // columns of b that are packed at once, and how often
  std::int64_t band, bands;       // rows of a band, and how many there are
  Left left;
  std::int64_t left_stride;            // elements between rows that are copied
  std::int64_t sliver;                 // words of a packed sliver
  std::size_t right_bytes;             // scratch for all threads together
  std::size_t left_bytes, sums_bytes;  // and for each
  std::size_t band_bytes() const { return left_bytes + sums_bytes; }
};

// Columns [col0, col0 + plan.cols) of b, or as many as there are, packed by dots_pack_tasks(...) tasks.
std::int64_t dots_pack_tasks(const GemmCall& call, const DotsPlan& plan, std::int64_t col0);
void dots_pack(const GemmCall& call, const DotsPlan& plan, std::int64_t col0, std::int64_t task, void* right);
// Rows [row0, row0 + plan.band) of c, or as many as there are, in the columns that `right` holds.
void dots_band(const GemmCall& call, const DotsPlan& plan, std::int64_t row0, std::int64_t col0,
               const void* right, void* scratch);

}  // namespace strata::cpu
