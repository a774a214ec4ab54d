// Sums to one fp64 number in two deterministic stages, and the clipping scale made from them.
//
// Shapes: count elements, fp32 or bf16, read once: 4 or 2 bytes each; up to 1024 partial sums of 8 bytes
// between. Tile: a block sums one contiguous range, 256 threads by eight elements a step, in fp64 (a square
// of an fp32 is exact in fp64, so only additions round). Ranges are at least four steps long and at most 1024
// in number, about seven blocks an SM; both follow from count alone, so the bits do not depend on the device.
// One block adds the partial sums.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/reduce.h"

namespace strata::gpu {
namespace {

constexpr std::int64_t most_ranges = sums_scratch_bytes / sizeof(double);
constexpr std::int64_t step_elements = std::int64_t{flat_threads} * wide, least_steps = 4;

template <bool Square, int N, class T>
__global__ void __launch_bounds__(flat_threads)
    sum_range_kernel(double* partial, const T* x, std::int64_t count, std::int64_t range) {
  const std::int64_t begin = blockIdx.x * range, end = min(begin + range, count);
  double sum = 0;
  for (std::int64_t i = begin + std::int64_t{threadIdx.x} * N; i < end; i += std::int64_t{flat_threads} * N) {
    const Floats<N> values = load<N>(x + i, end - i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double v = values[k];
      sum = Square ? fma(v, v, sum) : sum + v;
    }
  }
  const double total = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(flat_threads)
    sum_partials_kernel(double* out, const double* partial, int count, bool accumulate) {
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += flat_threads) sum += partial[i];
  const double total = block_sum(sum);
  if (threadIdx.x == 0) *out = accumulate ? *out + total : total;
}

__global__ void clip_scale_kernel(StepScale* out, const double* sums, float max_norm) {
  const double squares = sums[0], tokens = sums[1];
  StepScale result;
  result.finite = isfinite(squares) && isfinite(tokens);
  if (tokens > 0) {  // with every target masked there is no gradient and nothing to scale
    const double norm = sqrt(squares) / tokens;
    const double clip = max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0;
    result.norm = static_cast<float>(norm);
    result.gradient_scale = static_cast<float>(clip / tokens);
  }
  *out = result;
}

template <bool Square, class T>
void sum_flat(cudaStream_t stream, double* out, const T* x, std::int64_t count, bool accumulate,
              void* scratch) {
  const std::int64_t steps = ceil_div(count, step_elements);
  const std::int64_t range = std::max(least_steps, ceil_div(steps, most_ranges)) * step_elements;
  const auto ranges = static_cast<int>(ceil_div(count, range));
  auto* const partial = static_cast<double*>(scratch);
  if (ranges > 0) {
    with_width(aligned(x), [&](auto width) {
      GPU_LAUNCH((sum_range_kernel<Square, width, T>), ranges, flat_threads, 0, stream, partial, x, count,
                 range);
    });
    STRATA_CUDA(cudaGetLastError());
  }
  GPU_LAUNCH(sum_partials_kernel, 1, flat_threads, 0, stream, out, partial, ranges, accumulate);
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace

void sum(cudaStream_t stream, double* out, const float* values, std::int64_t count, bool accumulate,
         void* scratch) {
  sum_flat<false>(stream, out, values, count, accumulate, scratch);
}

void sum_of_squares(cudaStream_t stream, double* out, ConstFlat x, bool accumulate, void* scratch) {
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    sum_flat<true>(stream, out, static_cast<const T*>(x.data), x.count, accumulate, scratch);
  });
}

void clip_scale(cudaStream_t stream, StepScale* out, const double* sums, float max_norm) {
  GPU_LAUNCH(clip_scale_kernel, 1, 1, 0, stream, out, sums, max_norm);
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
