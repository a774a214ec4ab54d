// Embedding: rows of the table by token, and the sum of gradient rows by token.
//
// Shapes: table (V, C), N tokens (int32), out and dout (N, C); fp32 or bf16 (2 bytes below).
// Forward moves 2 N C + 2 N C + 4 N bytes. A block copies one row, a thread eight columns at a time.
// Backward reads dout once, reads and writes the rows of dtable whose token occurs (fp32: 8 bytes an
// element), and reads the N tokens once for each distinct token, from L2 (N = 4096: 16 KB each). Without
// accumulate, dtable is zeroed first: size V C.
//
// Backward is deterministic without atomics and without a sort: block (n, j) belongs to position n. It leaves
// if an earlier position holds the same token; else it finds the later ones, 256 positions at a time, and
// adds their rows in token order, fp32, rounded once, as the CPU does, bit for bit. The rows of one batch of
// positions do not depend on each other, so a frequent token's loads overlap. The scan costs N^2 / 2
// comparisons at worst: 8 million at N = 4096. Tile: 256 threads by eight columns, C = 4096 in two.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

#include <cmath>

namespace strata::gpu {
namespace {

constexpr int threads = 256;

template <int N, class T>
__global__ void __launch_bounds__(threads)
    embedding_forward_kernel(Rows<T> out, Rows<const T> table, const std::int32_t* tokens,
                             std::int64_t vocabulary, int columns) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t token = tokens[row];
  const bool known = token >= 0 && token < vocabulary;
  T* const to = out.row(row);
  const T* const from = table.row(known ? token : 0);
  for (int c = static_cast<int>(threadIdx.x) * N; c < columns; c += static_cast<int>(blockDim.x) * N) {
    Floats<N> x = load<N>(from + c, columns - c);
    if (!known) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = __int_as_float(0x7fffffff);
    }
    store<N>(to + c, x, columns - c);
  }
}

template <int N, class T>
__global__ void __launch_bounds__(threads) zero_rows_kernel(Rows<T> x, std::int64_t columns) {
  const std::int64_t row = blockIdx.x;
  for (std::int64_t c = std::int64_t{threadIdx.x} * N; c < columns; c += std::int64_t{blockDim.x} * N) {
    store<N>(x.row(row) + c, Floats<N>{}, columns - c);
  }
}

template <int N, class T, class From>
__global__ void __launch_bounds__(threads)
    embedding_backward_kernel(Rows<T> dtable, Rows<const From> dout, const std::int32_t* tokens,
                              std::int64_t vocabulary, int count, int columns, bool accumulate) {
  SHARED(int, found, threads);
  SHARED(int, found_by_warp, threads / warp_size);
  const int mine = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % warp_size, warp = thread / warp_size;
  const std::int32_t token = tokens[mine];
  if (token < 0 || token >= vocabulary) return;  // forward has answered with NaN
  bool earlier = false;
  for (int p = thread; p < mine; p += threads) earlier |= tokens[p] == token;
  if (__syncthreads_or(earlier)) return;

  const int c = (static_cast<int>(blockIdx.y) * threads + thread) * N;
  T* const to = dtable.row(token) + c;
  Floats<N> sums{};
  if (accumulate && c < columns) sums = load<N>(to, columns - c);
  for (int base = mine; base < count; base += threads) {
    const int p = base + thread;
    const bool same = p < count && tokens[p] == token;
    const unsigned votes = __ballot_sync(full_warp, same);
    if (lane == 0) found_by_warp[warp] = __popc(votes);
    __syncthreads();
    int place = __popc(votes & ((1u << lane) - 1u)), total = 0;
    for (int w = 0; w < threads / warp_size; ++w) {
      place += w < warp ? found_by_warp[w] : 0;
      total += found_by_warp[w];
    }
    if (same) found[place] = p;
    __syncthreads();
    if (c < columns) {
      for (int k = 0; k < total; ++k) {
        // The first row starts the sum where there is nothing to add to: 0 + (-0) would lose the sign.
        const Floats<N> row = load<N>(dout.row(found[k]) + c, columns - c);
        const bool starts = !accumulate && base == mine && k == 0;
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] = starts ? row[i] : sums[i] + row[i];
      }
    }
  }
  if (c < columns) store<N>(to, sums, columns - c);
}

}  // namespace

void embedding_forward(cudaStream_t stream, Matrix out, ConstMatrix table, const std::int32_t* tokens) {
  if (out.rows == 0 || out.cols == 0) return;
  with_type(table.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(all_aligned(out, table), [&](auto width) {
      constexpr int N = width;
      GPU_LAUNCH((embedding_forward_kernel<N, T>), grid_size(out.rows), row_threads(out.cols, N, 1, threads),
                 0, stream, rows_of<T>(out), rows_of<T>(table), tokens, table.rows,
                 static_cast<int>(out.cols));
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

void embedding_backward(cudaStream_t stream, Matrix dtable, ConstMatrix dout, const std::int32_t* tokens,
                        bool accumulate) {
  if (dtable.rows == 0 || dtable.cols == 0) return;
  with_type(dtable.dtype, [&](auto element) {
    using T = decltype(element);
    if (!accumulate) {
      with_width(all_aligned(dtable), [&](auto width) {
        constexpr int N = width;
        GPU_LAUNCH((zero_rows_kernel<N, T>), grid_size(dtable.rows), row_threads(dtable.cols, N, 1, threads),
                   0, stream, rows_of<T>(dtable), dtable.cols);
      });
      STRATA_CUDA(cudaGetLastError());
    }
    if (dout.rows == 0) return;
    with_type(dout.dtype, [&](auto from) {
      using From = decltype(from);
      with_width(all_aligned(dtable, dout), [&](auto width) {
        constexpr int N = width;
        const dim3 grid(grid_size(dout.rows), static_cast<unsigned>(ceil_div(dout.cols, threads * N)));
        GPU_LAUNCH((embedding_backward_kernel<N, T, From>), grid, threads, 0, stream, rows_of<T>(dtable),
                   rows_of<From>(dout), tokens, dtable.rows, static_cast<int>(dout.rows),
                   static_cast<int>(dout.cols), accumulate);
      });
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
