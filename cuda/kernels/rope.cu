// Rotary position embedding, in place: element i and i + D/2 of a head turn together.
//
// Shapes: x (N, H D) with any row stride, fp32 or bf16 (2 bytes below); cosine, sine (T, D/2) fp32; row n is
// at position n mod T. Reads and writes 2 N H D bytes each; the tables, 4 T D bytes, come from L2 but once.
//
// Tile: a block owns a row, a thread eight pairs of one head (two 16-byte accesses of bf16), so a row of 40
// heads of 128 (queries and keys of Llama-3.1-8B) is 320 threads' work: up to 512 a block.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

namespace strata::gpu {
namespace {

constexpr int most_threads = 512;

template <int N, class T>
__global__ void __launch_bounds__(most_threads)
    rope_kernel(Rows<T> x, const float* cosine, const float* sine, int columns, int half,
                std::int64_t sequence, bool inverse) {
  const std::int64_t position = blockIdx.x % sequence;
  T* const row = x.row(blockIdx.x);
  const float* const c = cosine + position * half;
  const float* const s = sine + position * half;
  const int pairs = columns / 2;
  for (int p = static_cast<int>(threadIdx.x) * N; p < pairs; p += static_cast<int>(blockDim.x) * N) {
    const int head = p / half, i = p - head * half;  // half is a multiple of N: no group straddles heads
    T* const first = row + head * 2 * half + i;
    const Floats<N> a = load<N>(first, N), b = load<N>(first + half, N);
    const Floats<N> cosines = load<N>(c + i, N), sines = load<N>(s + i, N);
    Floats<N> turned_a, turned_b;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float turn = inverse ? -sines[k] : sines[k];
      turned_a[k] = fmaf(-b[k], turn, a[k] * cosines[k]);
      turned_b[k] = fmaf(a[k], turn, b[k] * cosines[k]);
    }
    store<N>(first, turned_a, N);
    store<N>(first + half, turned_b, N);
  }
}

}  // namespace

void rope(cudaStream_t stream, Matrix x, std::int64_t head_size, std::int64_t sequence, const float* cosine,
          const float* sine, bool inverse) {
  if (x.rows == 0 || x.cols == 0) return;
  const std::int64_t half = head_size / 2;
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    const bool vectors = half % wide == 0 && all_aligned(x) && aligned(cosine) && aligned(sine);
    with_width(vectors, [&](auto width) {
      constexpr int N = width;
      GPU_LAUNCH((rope_kernel<N, T>), grid_size(x.rows), row_threads(x.cols / 2, N, 1, most_threads), 0,
                 stream, rows_of<T>(x), cosine, sine, static_cast<int>(x.cols), static_cast<int>(half),
                 sequence, inverse);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
