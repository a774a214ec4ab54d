#pragma once
// The arithmetic of reductions: contributions of all ranks are combined in rank order.
#include <cstdint>
#include <span>

#include "backend/communicator.h"
#include "backend/tensor.h"

namespace strata::mpi {

struct ReduceRule {
  enum class Kind : std::uint8_t { sum, mean, max } kind = Kind::sum;
  ReduceOptions options;
  std::span<const std::int64_t> weights;  // mean: empty for equal weights
};

// out (count) = the rule over contributions[rank] (each `out.count` elements of `wire`), which may alias out.
// fp32 is added in fp64, bf16 in fp32, fp64 in fp64; hop: rounded to the wire dtype after every addition. out
// is of the wire dtype, or fp32 with a bf16 wire. max: fp64 only; NaN wins.
void reduce_in_rank_order(Flat out, DType wire, std::span<const void* const> contributions,
                          const ReduceRule& rule);

}  // namespace strata::mpi
