// Fill, cast and a x + b y on flat buffers, the same bits as the CPU's.
//
// Shapes: n elements of fp32 or bf16, each operand its own. Fill writes, cast reads and writes, axpby reads
// both (y only when b is not 0) and writes y: 2 or 4 bytes an element and access. Tile: eight elements a
// thread, so that a bf16 operand is one 16-byte access and an fp32 one two.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

#include "backend/random.h"

namespace strata::gpu {
namespace {

template <int N, class T>
__global__ void __launch_bounds__(flat_threads) fill_kernel(T* out, std::int64_t count, float value) {
  const std::int64_t at = first_element<N>(), left = count - at;
  if (left <= 0) return;
  Floats<N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = value;
  store<N>(out + at, x, left);
}

template <int N, class To, class From>
__global__ void __launch_bounds__(flat_threads) cast_kernel(To* out, const From* in, std::int64_t count) {
  const std::int64_t at = first_element<N>(), left = count - at;
  if (left > 0) store<N>(out + at, load<N>(in + at, left), left);
}

template <int N, class Y, class X>
__global__ void __launch_bounds__(flat_threads)
    axpby_kernel(Y* y, const X* x, std::int64_t count, float a, float b) {
  const std::int64_t at = first_element<N>(), left = count - at;
  if (left <= 0) return;
  Floats<N> result = load<N>(x + at, left);
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = ieee::mul(a, result[i]);
  if (b != 0.0f) {
    const Floats<N> old = load<N>(y + at, left);
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = ieee::add(result[i], ieee::mul(b, old[i]));
  }
  store<N>(y + at, result, left);
}

}  // namespace

void fill(cudaStream_t stream, Flat out, float value) {
  if (out.count == 0) return;
  with_type(out.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(all_aligned(out), [&](auto width) {
      constexpr int N = width;
      GPU_LAUNCH((fill_kernel<N, T>), flat_grid(out.count, N), flat_threads, 0, stream,
                 static_cast<T*>(out.data), out.count, value);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

void cast(cudaStream_t stream, Flat out, ConstFlat in) {
  if (out.count == 0 || (out.data == in.data && out.dtype == in.dtype)) return;
  with_type(out.dtype, [&](auto to) {
    using To = decltype(to);
    with_type(in.dtype, [&](auto from) {
      using From = decltype(from);
      with_width(all_aligned(out, in), [&](auto width) {
        constexpr int N = width;
        GPU_LAUNCH((cast_kernel<N, To, From>), flat_grid(out.count, N), flat_threads, 0, stream,
                   static_cast<To*>(out.data), static_cast<const From*>(in.data), out.count);
      });
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

void axpby(cudaStream_t stream, Flat y, float a, ConstFlat x, float b) {
  if (y.count == 0) return;
  with_type(y.dtype, [&](auto to) {
    using Y = decltype(to);
    with_type(x.dtype, [&](auto from) {
      using X = decltype(from);
      with_width(all_aligned(y, x), [&](auto width) {
        constexpr int N = width;
        GPU_LAUNCH((axpby_kernel<N, Y, X>), flat_grid(y.count, N), flat_threads, 0, stream,
                   static_cast<Y*>(y.data), static_cast<const X*>(x.data), y.count, a, b);
      });
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
