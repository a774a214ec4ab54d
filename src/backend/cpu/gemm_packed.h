#pragma once
// The packed product of gemm.h: one block of c at a time.
#include <cstddef>
#include <cstdint>

#include "backend/cpu/gemm.h"

namespace strata::cpu {

constexpr std::int64_t kPackedBlockRows = 1008, kPackedBlockCols = 1024;  // of c; rows a multiple of 6 and 12

// Floats of scratch for one block of this product.
std::size_t packed_scratch_floats(const GemmCall& call);

// c[row0 ..., col0 ...] of one block (at most kPackedBlockRows x kPackedBlockCols).
void packed_block(const GemmCall& call, std::int64_t row0, std::int64_t col0, float* scratch);

}  // namespace strata::cpu
