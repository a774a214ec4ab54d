// int8 with one fp32 scale a block of elements and error feedback, the same bits as the CPU's.
//
// Shapes: n elements in ceil(n / block) blocks. quantize reads x (4 n bytes of fp32, twice: the second time
// from L1 or L2) and the error (4 n), writes q (n), scales (4 n / block) and the error (4 n). dequantize
// reads n + 4 n / block and, when it adds, 4 n, and writes 4 n. Tile: quantizing, a warp owns a block, so
// that its largest magnitude takes five shuffles and no barrier; 32 lanes by eight elements cover 256 a step.
// Dequantizing, a thread owns eight elements; they lie in one block when the block is a multiple of 8, else
// the one-element kernel runs. q moves by 8 bytes a thread, which is a sixteenth of the traffic.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

#include "backend/random.h"

namespace strata::gpu {
namespace {

template <int N>
__device__ __forceinline__ void store_int8(std::int8_t* p, const Floats<N>& x, std::int64_t count) {
  if (N == wide && count >= N) {
    std::uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      words[i / 4] |= (static_cast<std::uint32_t>(static_cast<std::int32_t>(x[i])) & 0xffu) << (8 * (i % 4));
    }
    *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) p[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(x[i]));
    }
  }
}

template <int N>
__device__ __forceinline__ Floats<N> load_int8(const std::int8_t* p, std::int64_t count) {
  Floats<N> x;
  if (N == wide && count >= N) {
    const uint2 words = *reinterpret_cast<const uint2*>(p);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const std::uint32_t word = i < 4 ? words.x : words.y;
      x[i] = static_cast<float>(static_cast<std::int8_t>(word >> (8 * (i % 4)) & 0xffu));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = i < count ? static_cast<float>(p[i]) : 0.0f;
  }
  return x;
}

template <int N, class T>
__global__ void __launch_bounds__(flat_threads)
    quantize_kernel(std::int8_t* q, float* scales, float* error, const T* x, std::int64_t count,
                    std::int64_t block) {
  const std::int64_t mine = first_element<1>() / warp_size;
  const std::int64_t begin = mine * block, end = min(begin + block, count);
  if (begin >= count) return;  // the whole warp
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const auto value = [&](std::int64_t at) {
    Floats<N> v = load<N>(x + at, end - at);
    if (error != nullptr) {
      const Floats<N> e = load<N>(error + at, end - at);
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] += e[i];
    }
    return v;
  };

  // Magnitudes compared as integers, so that a NaN, the largest of all, reaches the scale.
  std::uint32_t most = 0;
  for (std::int64_t at = begin + lane * N; at < end; at += warp_size * N) {
    const Floats<N> v = value(at);
#pragma unroll
    for (int i = 0; i < N; ++i) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (int offset = warp_size / 2; offset > 0; offset /= 2) {
    most = max(most, __shfl_xor_sync(full_warp, most, offset));
  }
  const float step = ieee::div(__uint_as_float(most), 127.0f);
  if (lane == 0) scales[mine] = step;
  // A scale that is zero or not finite keeps nothing (q = 0; dequantizing gives 0 or NaN); a subnormal one is
  // rounded so coarsely that a ratio may pass 127.
  const bool usable = most != 0 && most < 0x7f800000u && step > 0.0f;
  for (std::int64_t at = begin + lane * N; at < end; at += warp_size * N) {
    const Floats<N> v = value(at);
    Floats<N> rounded, left;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float ratio = usable ? fminf(fmaxf(ieee::div(v[i], step), -127.0f), 127.0f) : 0.0f;
      // Adding and taking away 1.5 2^23 rounds to the nearest integer, ties to even.
      rounded[i] = ieee::add(ieee::add(ratio, 12582912.0f), -12582912.0f);
      left[i] = ieee::add(v[i], -ieee::mul(rounded[i], step));
    }
    store_int8<N>(q + at, rounded, end - at);
    if (error != nullptr) store<N>(error + at, left, end - at);
  }
}

template <int N, class T>
__global__ void __launch_bounds__(flat_threads)
    dequantize_kernel(T* out, const std::int8_t* q, const float* scales, std::int64_t count,
                      std::int64_t block, float weight, bool accumulate) {
  const std::int64_t at = first_element<N>(), left = count - at;
  if (left <= 0) return;
  const float factor = ieee::mul(weight, scales[at / block]);
  Floats<N> v = load_int8<N>(q + at, left);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = ieee::mul(factor, v[i]);
  if (accumulate) {
    const Floats<N> old = load<N>(out + at, left);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = ieee::add(old[i], v[i]);
  }
  store<N>(out + at, v, left);
}

bool int8_aligned(const std::int8_t* q, std::int64_t block) {
  return block % wide == 0 && reinterpret_cast<std::uintptr_t>(q) % wide == 0;
}

}  // namespace

void quantize_int8(cudaStream_t stream, std::int8_t* q, float* scales, Flat error, ConstFlat x,
                   std::int64_t block) {
  if (x.count == 0) return;
  with_type(x.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(int8_aligned(q, block) && all_aligned(x, error), [&](auto width) {
      constexpr int N = width;
      const std::int64_t blocks = ceil_div(x.count, block);
      GPU_LAUNCH((quantize_kernel<N, T>), grid_size(ceil_div(blocks, flat_threads / warp_size)), flat_threads,
                 0, stream, q, scales, static_cast<float*>(error.data), static_cast<const T*>(x.data),
                 x.count, block);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

void dequantize_int8(cudaStream_t stream, Flat out, const std::int8_t* q, const float* scales,
                     std::int64_t block, float weight, bool accumulate) {
  if (out.count == 0) return;
  with_type(out.dtype, [&](auto element) {
    using T = decltype(element);
    with_width(int8_aligned(q, block) && all_aligned(out), [&](auto width) {
      constexpr int N = width;
      GPU_LAUNCH((dequantize_kernel<N, T>), flat_grid(out.count, N), flat_threads, 0, stream,
                 static_cast<T*>(out.data), q, scales, out.count, block, weight, accumulate);
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
