// Normal random numbers by the element's index in its parameter, the same bits as the CPU's
// (backend/random.h).
//
// Shapes: n elements, 2 or 4 bytes each, written once; nothing is read.
// Tile: eight elements a thread, which are two Philox blocks; a buffer that starts inside one takes the
// one-element kernel. Arithmetic, about 60 instructions an element, costs more than the store; it runs once a
// training.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

#include "backend/random.h"

namespace strata::gpu {
namespace {

template <int N, class T>
__global__ void __launch_bounds__(flat_threads)
    initialize_normal_kernel(T* out, std::int64_t count, float standard_deviation, RandomKey key,
                             std::uint64_t first_in_parameter) {
  const std::int64_t at = first_element<N>(), left = count - at;
  if (left <= 0) return;
  const std::uint64_t element = first_in_parameter + static_cast<std::uint64_t>(at);
  Floats<N> x;
  if constexpr (N == 1) {
    x[0] = normal(key, element);
  } else {
#pragma unroll
    for (int k = 0; k < N; k += 4) {
      const PhiloxBlock words = philox_block(key, (element + static_cast<std::uint64_t>(k)) / 4);
      normal_pair(words.word[0], words.word[1], x[k], x[k + 1]);
      normal_pair(words.word[2], words.word[3], x[k + 2], x[k + 3]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = ieee::mul(x[i], standard_deviation);
  store<N>(out + at, x, left);
}

}  // namespace

void initialize_normal(cudaStream_t stream, Flat out, float standard_deviation, RandomKey key,
                       std::int64_t first_element) {
  if (out.count == 0) return;
  with_type(out.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(first_element % 4 == 0 && all_aligned(out), [&](auto width) {
      constexpr int N = width;
      GPU_LAUNCH((initialize_normal_kernel<N, T>), flat_grid(out.count, N), flat_threads, 0, stream,
                 static_cast<T*>(out.data), out.count, standard_deviation, key,
                 static_cast<std::uint64_t>(first_element));
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
