// Softmax cross-entropy over rows of logits, with the gradient in place. The model calls it on chunks of
// rows, so that the logits of all tokens never exist at once.
//
// Shapes: logits (R, V), fp32 or bf16 (2 bytes below), targets (R) int32, losses (R) fp32.
// Reads 2 R V bytes from memory once, a second time from L2 for the gradient (a row of 128256 is 250 KB, and
// one block an SM keeps under 40 MB of them in flight), and writes 2 R V.
//
// Tile: a block of 512 threads owns a row and passes over it once for the maximum and the sum of exponentials
// together (each thread rescales its sum when its maximum grows), and once for the gradient; eight columns a
// thread and step make V = 128256 32 steps, with only two barriers a row. The sums join in a fixed order. exp
// and log are of the difference to the row's maximum, so nothing overflows; at the target, softmax - 1 is
// expm1.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/reduce.h"

namespace strata::gpu {
namespace {

constexpr int most_threads = 512;

// The maximum of some logits and the sum of exp(logit - maximum); of none: {-inf, 0}.
struct Softmax {
  float most, sum;
};

__device__ __forceinline__ float minus_infinity() {
  return __int_as_float(static_cast<int>(0xff800000u));
}

// What to subtract: the maximum, or 0 where all are -inf, since -inf - -inf is no number.
__device__ __forceinline__ float shift_of(float most) {
  return most == minus_infinity() ? 0.0f : most;
}

__device__ __forceinline__ Softmax join(const Softmax& a, const Softmax& b) {
  const float most = fmaxf(a.most, b.most), shift = shift_of(most);
  return {most, a.sum * expf(a.most - shift) + b.sum * expf(b.most - shift)};
}

// Over the block, in every thread; holds a barrier.
__device__ __forceinline__ Softmax block_join(Softmax mine) {
  SHARED(float, mosts, max_warps);
  SHARED(float, sums, max_warps);
#pragma unroll
  for (int offset = warp_size / 2; offset > 0; offset /= 2) {
    const float most = __shfl_down_sync(full_warp, mine.most, offset);
    const float sum = __shfl_down_sync(full_warp, mine.sum, offset);
    mine = join(mine, {most, sum});
  }
  if (threadIdx.x % warp_size == 0) {
    mosts[threadIdx.x / warp_size] = mine.most;
    sums[threadIdx.x / warp_size] = mine.sum;
  }
  __syncthreads();
  Softmax total{mosts[0], sums[0]};
  for (int w = 1; w < static_cast<int>(blockDim.x) / warp_size; ++w) total = join(total, {mosts[w], sums[w]});
  return total;
}

template <int N, class T>
__global__ void __launch_bounds__(most_threads)
    cross_entropy_kernel(Rows<T> logits, float* losses, const std::int32_t* targets, int columns,
                         bool write_gradient) {
  const std::int64_t row = blockIdx.x;
  T* const x = logits.row(row);
  const int target = targets[row];
  const int first = static_cast<int>(threadIdx.x) * N, step = static_cast<int>(blockDim.x) * N;
  if (target < 0) {
    if (threadIdx.x == 0) losses[row] = 0.0f;
    if (write_gradient) {
      for (int c = first; c < columns; c += step) store<N>(x + c, Floats<N>{}, columns - c);
    }
    return;
  }
  // Read before the barrier below: after it, another thread overwrites it.
  const float at_target = target < columns ? widen(x[target]) : __int_as_float(0x7fffffff);

  Softmax mine{minus_infinity(), 0.0f};
  for (int c = first; c < columns; c += step) {
    const Floats<N> v = load<N>(x + c, columns - c, minus_infinity());
    float most = mine.most;
#pragma unroll
    for (int i = 0; i < N; ++i) most = fmaxf(most, v[i]);
    const float shift = shift_of(most);
    float sum = mine.sum * expf(mine.most - shift);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += expf(v[i] - shift);
    mine = {most, sum};
  }
  const Softmax all = block_join(mine);
  const float log_sum = logf(all.sum);
  const float chosen = at_target - all.most;
  if (threadIdx.x == 0) losses[row] = log_sum - chosen;
  if (!write_gradient) return;

  const float gradient_at_target = expm1f(chosen - log_sum);
  const bool known = target < columns;
  for (int c = first; c < columns; c += step) {
    Floats<N> v = load<N>(x + c, columns - c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = expf((v[i] - all.most) - log_sum);
      if (c + i == target || !known) v[i] = gradient_at_target;
    }
    store<N>(x + c, v, columns - c);
  }
}

}  // namespace

void cross_entropy(cudaStream_t stream, Matrix logits, float* losses, const std::int32_t* targets,
                   bool write_gradient) {
  if (logits.rows == 0) return;
  with_type(logits.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(all_aligned(logits), [&](auto width) {
      constexpr int N = width;
      GPU_LAUNCH((cross_entropy_kernel<N, T>), grid_size(logits.rows),
                 row_threads(logits.cols, N, 1, most_threads), 0, stream, rows_of<T>(logits), losses, targets,
                 static_cast<int>(logits.cols), write_gradient);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
