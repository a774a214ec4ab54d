// SwiGLU: out = gate sigmoid(gate) up, and its gradient.
//
// Shapes: gate_up (N, 2 F), gate in the first F columns; out, dout (N, F); fp32 or bf16 (2 bytes below).
// Forward reads 4 N F and writes 2 N F bytes; backward reads 6 N F and writes 4 N F.
//
// Tile: 256 threads by eight columns of one row, so F = 14336 takes seven blocks a row and no thread idles;
// two (three) 16-byte loads in flight a thread fill the memory system at full occupancy. sigmoid is 1 / (1 +
// e^-x) with the full expf and a division that gives 0 for denominators past 2^126: gates of any size stay
// finite.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

namespace strata::gpu {
namespace {

constexpr int threads = 256;

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));
}

// The row and first column of this thread's group; blocks count through the tiles of a row, then through
// rows.
struct Place {
  std::int64_t row;
  int column;
};
template <int N>
__device__ __forceinline__ Place place(int tiles) {
  const std::int64_t row = blockIdx.x / static_cast<unsigned>(tiles);
  const int tile = static_cast<int>(blockIdx.x - row * tiles);
  return {row, (tile * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N};
}

template <int N, class T>
__global__ void __launch_bounds__(threads)
    swiglu_forward_kernel(Rows<T> out, Rows<const T> gate_up, int columns, int tiles) {
  const auto [row, c] = place<N>(tiles);
  if (c >= columns) return;
  const T* const from = gate_up.row(row) + c;
  const Floats<N> gate = load<N>(from, columns - c), up = load<N>(from + columns, columns - c);
  Floats<N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = gate[i] * sigmoid(gate[i]) * up[i];
  store<N>(out.row(row) + c, result, columns - c);
}

template <int N, class T>
__global__ void __launch_bounds__(threads)
    swiglu_backward_kernel(Rows<T> dgate_up, Rows<const T> dout, Rows<const T> gate_up, int columns,
                           int tiles) {
  const auto [row, c] = place<N>(tiles);
  if (c >= columns) return;
  const T* const from = gate_up.row(row) + c;
  const Floats<N> gate = load<N>(from, columns - c), up = load<N>(from + columns, columns - c);
  const Floats<N> d = load<N>(dout.row(row) + c, columns - c);
  Floats<N> dgate, dup;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float s = sigmoid(gate[i]);
    const float slope = s * fmaf(gate[i], 1.0f - s, 1.0f);  // of gate sigmoid(gate)
    dgate[i] = d[i] * up[i] * slope;
    dup[i] = d[i] * (gate[i] * s);
  }
  T* const to = dgate_up.row(row) + c;
  store<N>(to, dgate, columns - c);
  store<N>(to + columns, dup, columns - c);
}

// up starts `columns` elements after gate, so the columns must keep it aligned.
bool halves_aligned(std::int64_t columns) {
  return columns % wide == 0;
}

struct Tiling {
  int tiles, threads;
  unsigned grid;
};
Tiling tiling(std::int64_t rows, std::int64_t columns, int width) {
  const int block = row_threads(columns, width, 1, threads);
  const std::int64_t tiles = ceil_div(columns, std::int64_t{block} * width);
  return {static_cast<int>(tiles), block, grid_size(rows * tiles)};
}

}  // namespace

void swiglu_forward(cudaStream_t stream, Matrix out, ConstMatrix gate_up) {
  if (out.rows == 0 || out.cols == 0) return;
  with_type(out.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(halves_aligned(out.cols) && all_aligned(out, gate_up), [&](auto width) {
      constexpr int N = width;
      const Tiling t = tiling(out.rows, out.cols, N);
      GPU_LAUNCH((swiglu_forward_kernel<N, T>), t.grid, t.threads, 0, stream, rows_of<T>(out),
                 rows_of<T>(gate_up), static_cast<int>(out.cols), t.tiles);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

void swiglu_backward(cudaStream_t stream, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up) {
  if (dout.rows == 0 || dout.cols == 0) return;
  with_type(dout.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(halves_aligned(dout.cols) && all_aligned(dgate_up, dout, gate_up), [&](auto width) {
      constexpr int N = width;
      const Tiling t = tiling(dout.rows, dout.cols, N);
      GPU_LAUNCH((swiglu_backward_kernel<N, T>), t.grid, t.threads, 0, stream, rows_of<T>(dgate_up),
                 rows_of<T>(dout), rows_of<T>(gate_up), static_cast<int>(dout.cols), t.tiles);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
