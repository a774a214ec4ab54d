#pragma once
// Sums over a block in an order that only the block's size decides. blockDim is one-dimensional and a
// multiple of 32.
#include "cuda/kernels/gpu.h"

namespace strata::gpu {

inline constexpr int max_warps = 32;

// The same bits in every lane: both sides of each exchange add the same two numbers.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int offset = warp_size / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_warp, x, offset);
  return x;
}

// The sum of x over the block, in every thread. One barrier; so calls that follow one another use slots 0 and
// 1 in turn, since a fast warp may write the next sum while a slow one reads this.
template <class T>
__device__ __forceinline__ T block_sum(T x, int slot = 0) {
  SHARED(T, partial, 2, max_warps);
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  x = warp_sum(x);
  if (threadIdx.x % warp_size == 0) partial[slot][warp] = x;
  __syncthreads();
  T total = partial[slot][0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / warp_size; ++w) total += partial[slot][w];
  return total;
}

}  // namespace strata::gpu
