// RMSNorm with the residual add fused, forward and backward.
//
// Shapes: N rows of C columns, any row stride; fp32 or bf16 (2 bytes below), arithmetic fp32.
// Forward reads x, residual and the weight, writes sum, y and rstd: N C (2 + 2 + 2 + 2) + 4 N + 2 C bytes,
// each once: a block owns a row and keeps it in registers between its two passes. Backward reads dy, h,
// dresidual, writes dx: N C (2 + 2 + 2 + 2) + 4 N + 2 C bytes; the weight's gradient adds 8 P C bytes for P
// partial sums, which stay in L2.
//
// Tiles: a thread keeps two groups of eight columns, so C = 4096 takes 256 threads and C = 8192 512, with no
// column idle; two groups are 32 (forward) or 64 bytes of loads in flight a thread, enough to cover memory
// latency at 1024 threads an SM. Columns past 2 x 8 x 512 are read a second time, from L2. The weight's
// gradient is a sum over rows: a block goes through N/P neighbouring rows with its columns' sums in registers
// (in shared memory past 8192 columns), then a second kernel adds the P rows of partial sums in order. P
// depends on N alone, so the bits do not depend on the device; 256 blocks are about two an SM on the GPUs of
// interest (108 to 148 SMs), which their 512 to 1024 threads fill.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/reduce.h"

namespace strata::gpu {
namespace {

constexpr int kept_groups = 2;
constexpr int most_threads = 512;
constexpr std::int64_t most_partials = 256, least_rows_of_partial = 4;
// Columns a block can sum outside registers: the 163 KiB of shared memory of sm_80, less the reductions'.
constexpr std::size_t most_shared_bytes = 160 * 1024;

template <int N, class T>
__global__ void __launch_bounds__(most_threads)
    rmsnorm_forward_kernel(Rows<T> y, float* rstd, Rows<T> sum, Rows<const T> x, Rows<const T> residual,
                           const T* weight, int columns, float eps) {
  const std::int64_t row = blockIdx.x;
  const int step = static_cast<int>(blockDim.x) * N;
  const int first = static_cast<int>(threadIdx.x) * N;
  const T* const in = x.row(row);
  const T* const add = residual ? residual.row(row) : nullptr;
  T* const keep = sum ? sum.row(row) : nullptr;
  T* const out = y.row(row);

  const auto hidden = [&](int c) {
    Floats<N> h = load<N>(in + c, columns - c);
    if (add) {
      const Floats<N> r = load<N>(add + c, columns - c);
#pragma unroll
      for (int i = 0; i < N; ++i) h[i] = rounded_to<T>(h[i] + r[i]);
    }
    return h;
  };
  float squares = 0;
  const auto square = [&](const Floats<N>& h) {
#pragma unroll
    for (int i = 0; i < N; ++i) squares = fmaf(h[i], h[i], squares);
  };

  Floats<N> kept[kept_groups];
#pragma unroll
  for (int k = 0; k < kept_groups; ++k) {
    const int c = first + k * step;
    if (c < columns) {
      kept[k] = hidden(c);
      if (keep) store<N>(keep + c, kept[k], columns - c);
      square(kept[k]);
    }
  }
  for (int c = first + kept_groups * step; c < columns; c += step) {
    const Floats<N> h = hidden(c);
    if (keep) store<N>(keep + c, h, columns - c);
    square(h);
  }

  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(columns) + eps);
  if (threadIdx.x == 0) rstd[row] = scale;
  const auto finish = [&](const Floats<N>& h, int c) {
    const Floats<N> w = load<N>(weight + c, columns - c);
    Floats<N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = h[i] * scale * w[i];
    store<N>(out + c, result, columns - c);
  };
#pragma unroll
  for (int k = 0; k < kept_groups; ++k) {
    const int c = first + k * step;
    if (c < columns) finish(kept[k], c);
  }
  for (int c = first + kept_groups * step; c < columns; c += step) {
    // sum may have replaced x or residual
    finish(keep ? load<N>(keep + c, columns - c) : hidden(c), c);
  }
}

// partial (gridDim, columns): sums over this block's rows of dy * h * rstd.
template <int N, class T>
__global__ void __launch_bounds__(most_threads)
    rmsnorm_backward_kernel(Rows<T> dx, float* partial, Rows<const T> dy, Rows<const T> dresidual,
                            Rows<const T> h, const T* weight, const float* rstd, std::int64_t rows,
                            std::int64_t rows_of_block, int columns) {
  DYN_SMEM(float, rest_sums);  // of the columns past the kept groups, each owned by one thread
  const int step = static_cast<int>(blockDim.x) * N;
  const int first = static_cast<int>(threadIdx.x) * N;
  const int rest = first + kept_groups * step;
  Floats<N> kept_sums[kept_groups] = {};
  for (int c = rest; c < columns; c += step) {
    store<N>(rest_sums + (c - kept_groups * step), Floats<N>{}, columns - c);
  }

  const std::int64_t begin = blockIdx.x * rows_of_block;
  const std::int64_t end = min(begin + rows_of_block, rows);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const gradient = dy.row(row);
    const T* const input = h.row(row);
    const T* const skip = dresidual ? dresidual.row(row) : nullptr;
    T* const out = dx.row(row);
    float dot = 0;
    const auto multiply = [&](const Floats<N>& g, const Floats<N>& x, int c) {
      const Floats<N> w = load<N>(weight + c, columns - c);
#pragma unroll
      for (int i = 0; i < N; ++i) dot = fmaf(g[i] * w[i], x[i], dot);
    };
    Floats<N> kept_gradient[kept_groups], kept_input[kept_groups];
#pragma unroll
    for (int k = 0; k < kept_groups; ++k) {
      const int c = first + k * step;
      if (c < columns) {
        kept_gradient[k] = load<N>(gradient + c, columns - c);
        kept_input[k] = load<N>(input + c, columns - c);
        multiply(kept_gradient[k], kept_input[k], c);
      }
    }
    for (int c = rest; c < columns; c += step) {
      multiply(load<N>(gradient + c, columns - c), load<N>(input + c, columns - c), c);
    }

    const float scale = rstd[row];
    const float total = block_sum(dot, static_cast<int>(row & 1));
    const float back = total * scale * scale / static_cast<float>(columns);
    // Writes dx and returns what the columns add to the weight's gradient.
    const auto finish = [&](const Floats<N>& g, const Floats<N>& x, int c, Floats<N> sums) {
      const Floats<N> w = load<N>(weight + c, columns - c);
      Floats<N> d;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        d[i] = scale * fmaf(-x[i], back, g[i] * w[i]);
        sums[i] = fmaf(g[i], x[i] * scale, sums[i]);
      }
      if (skip) {
        const Floats<N> r = load<N>(skip + c, columns - c);
#pragma unroll
        for (int i = 0; i < N; ++i) d[i] += r[i];
      }
      store<N>(out + c, d, columns - c);
      return sums;
    };
#pragma unroll
    for (int k = 0; k < kept_groups; ++k) {
      const int c = first + k * step;
      if (c < columns) kept_sums[k] = finish(kept_gradient[k], kept_input[k], c, kept_sums[k]);
    }
    for (int c = rest; c < columns; c += step) {
      float* const sums = rest_sums + (c - kept_groups * step);
      store<N>(sums,
               finish(load<N>(gradient + c, columns - c), load<N>(input + c, columns - c), c,
                      load<N>(sums, columns - c)),
               columns - c);
    }
  }

  float* const mine = partial + std::int64_t{blockIdx.x} * columns;
#pragma unroll
  for (int k = 0; k < kept_groups; ++k) {
    const int c = first + k * step;
    if (c < columns) store<N>(mine + c, kept_sums[k], columns - c);
  }
  for (int c = rest; c < columns; c += step) {
    store<N>(mine + c, load<N>(rest_sums + (c - kept_groups * step), columns - c), columns - c);
  }
}

constexpr int sum_columns = warp_size, sum_groups = 8;

// out (columns) (+)= the sum of `count` rows of partial: eight warps take every eighth row of the same 32
// columns, so that the loads of a column do not wait for each other, and their sums are added in order.
template <class T>
__global__ void __launch_bounds__(sum_columns* sum_groups)
    sum_partials_kernel(T* out, const float* partial, int count, int columns, bool accumulate) {
  SHARED(float, sums, sum_groups, sum_columns);
  const int lane = static_cast<int>(threadIdx.x) % sum_columns,
            group = static_cast<int>(threadIdx.x) / sum_columns;
  const int column = static_cast<int>(blockIdx.x) * sum_columns + lane;
  float sum = 0;
  if (column < columns) {
    for (int row = group; row < count; row += sum_groups)
      sum += partial[std::int64_t{row} * columns + column];
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || column >= columns) return;
  for (int other = 1; other < sum_groups; ++other) sum += sums[other][lane];
  out[column] = narrow<T>(accumulate ? widen(out[column]) + sum : sum);
}

std::int64_t partials(std::int64_t rows) {
  return std::clamp<std::int64_t>(ceil_div(rows, least_rows_of_partial), 1, most_partials);
}

}  // namespace

void rmsnorm_forward(cudaStream_t stream, Matrix y, float* rstd, Matrix sum, ConstMatrix x,
                     ConstMatrix residual, ConstFlat weight, float eps) {
  if (x.rows == 0 || x.cols == 0) return;
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(all_aligned(y, sum, x, residual, weight), [&](auto width) {
      constexpr int N = width;
      GPU_LAUNCH((rmsnorm_forward_kernel<N, T>), grid_size(x.rows),
                 row_threads(x.cols, N, kept_groups, most_threads), 0, stream, rows_of<T>(y), rstd,
                 rows_of<T>(sum), rows_of<T>(x), rows_of<T>(residual), static_cast<const T*>(weight.data),
                 static_cast<int>(x.cols), eps);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

std::size_t rmsnorm_backward_scratch_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(partials(rows) * columns) * sizeof(float);
}

void rmsnorm_backward(cudaStream_t stream, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                      ConstMatrix h, ConstFlat weight, const float* rstd, bool accumulate_dweight,
                      void* scratch) {
  if (h.cols == 0) return;
  const auto parts = static_cast<int>(partials(h.rows));
  auto* const partial = static_cast<float*>(scratch);
  with_type(h.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(h.cols % wide == 0 && all_aligned(dx, dy, dresidual, h, weight, scratch), [&](auto width) {
      constexpr int N = width;
      const int threads = row_threads(h.cols, N, kept_groups, most_threads);
      // one group at least: a kernel that names its dynamic shared memory is launched with some
      const std::int64_t rest = std::max<std::int64_t>(N, h.cols - std::int64_t{kept_groups} * threads * N);
      const std::size_t shared_bytes = static_cast<std::size_t>(rest) * sizeof(float);
      if (shared_bytes > most_shared_bytes) {
        throw InternalError(
            "rmsnorm_backward: " + std::to_string(h.cols) +
            " columns are more than a block's shared memory can sum -> use a smaller hidden size");
      }
      if (shared_bytes > 48 * 1024)
        STRATA_CUDA(allow_shared_bytes(rmsnorm_backward_kernel<N, T>, shared_bytes));
      GPU_LAUNCH((rmsnorm_backward_kernel<N, T>), parts, threads, shared_bytes, stream, rows_of<T>(dx),
                 partial, rows_of<T>(dy), rows_of<T>(dresidual), rows_of<T>(h),
                 static_cast<const T*>(weight.data), rstd, h.rows, ceil_div(h.rows, parts),
                 static_cast<int>(h.cols));
      STRATA_CUDA(cudaGetLastError());
    });
  });
  with_type(dweight.dtype, [&](auto element) {
    using T = decltype(element);
    GPU_LAUNCH((sum_partials_kernel<T>), grid_size(ceil_div(h.cols, sum_columns)), sum_columns * sum_groups,
               0, stream, static_cast<T*>(dweight.data), partial, parts, static_cast<int>(h.cols),
               accumulate_dweight);
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
