// AdamW and SGD on flat shards, the same bits as the CPU's: every operation is rounded by itself, in the
// CPU's order.
//
// Shapes: n elements. AdamW with fp32 parameter, m, v and gradient and a bf16 copy for compute reads 16 n and
// writes 14 n bytes; bf16_pure reads 8 n and writes 6 n. SGD reads 8 n and writes 4 n (+ 2 n). Stochastic
// rounding draws from Philox by the element's index in its parameter, so no cut of the buffer changes it: one
// Philox block serves the eight elements of a thread.
//
// Tile: eight elements a thread, which is one Philox block and two 16-byte accesses of each fp32 operand;
// four operands are 128 bytes in flight a thread, so half the SM's threads already cover the memory's
// latency.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

#include <cmath>

#include "backend/random.h"

namespace strata::gpu {
namespace {

// What the host computes once, in fp64, from AdamWStep.
struct AdamWConstants {
  float beta1, rest1, beta2, rest2;
  float keep;   // 1 - lr weight_decay
  float rate;   // lr over the first moment's bias correction
  float root2;  // 1 / sqrt of the second moment's
  float eps;
};

AdamWConstants constants(const AdamWStep& step) {
  const double correction1 = 1.0 - std::pow(static_cast<double>(step.beta1), static_cast<double>(step.step));
  const double correction2 = 1.0 - std::pow(static_cast<double>(step.beta2), static_cast<double>(step.step));
  return {step.beta1,
          1.0f - step.beta1,
          step.beta2,
          1.0f - step.beta2,
          static_cast<float>(1.0 - static_cast<double>(step.lr) * step.weight_decay),
          static_cast<float>(step.lr / correction1),
          static_cast<float>(1.0 / std::sqrt(correction2)),
          step.eps};
}

// Element i of the group draws word i of the group's Philox block; `element` is the first's index, a multiple
// of 8 when N is 8.
template <int N>
__device__ __forceinline__ void store_stochastic(__nv_bfloat16* p, const Floats<N>& x, std::int64_t count,
                                                 RandomKey key, std::uint64_t element) {
  const PhiloxBlock block = philox_block(key, element / wide);
  Vec<std::uint16_t> bits;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const std::uint32_t in_block =
        N == 1 ? static_cast<std::uint32_t>(element % wide) : static_cast<std::uint32_t>(i);
    bits[i] = stochastic_bf16_bits(x[i], rounding_word(block, in_block));
  }
  auto* const to = reinterpret_cast<std::uint16_t*>(p);
  if (N > 1 && count >= N) {
    store_vec(to, bits);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) to[i] = bits[i];
    }
  }
}

template <int N, class T, class G>
__global__ void __launch_bounds__(flat_threads)
    adamw_kernel(T* parameter, __nv_bfloat16* compute, const G* gradient, T* first_moment, T* second_moment,
                 std::int64_t count, AdamWConstants a, const StepScale* scale, bool stochastic, RandomKey key,
                 std::uint64_t first_in_parameter) {
  if (scale->finite == 0) return;
  const float gradient_scale = scale->gradient_scale;
  const std::int64_t at = first_element<N>(), left = count - at;
  if (left <= 0) return;
  const Floats<N> g = load<N>(gradient + at, left);
  Floats<N> p = load<N>(parameter + at, left);
  Floats<N> m = load<N>(first_moment + at, left), v = load<N>(second_moment + at, left);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    using namespace ieee;
    const float gi = mul(g[i], gradient_scale);
    m[i] = add(mul(m[i], a.beta1), mul(gi, a.rest1));
    v[i] = add(mul(v[i], a.beta2), mul(mul(gi, gi), a.rest2));
    const float denominator = add(mul(ieee::sqrt(v[i]), a.root2), a.eps);
    p[i] = add(mul(p[i], a.keep), -ieee::div(mul(a.rate, m[i]), denominator));
  }
  if constexpr (sizeof(T) == 2) {
    if (stochastic) {
      store_stochastic<N>(parameter + at, p, left, key, first_in_parameter + static_cast<std::uint64_t>(at));
    } else {
      store<N>(parameter + at, p, left);
    }
  } else {
    store<N>(parameter + at, p, left);
  }
  store<N>(first_moment + at, m, left);
  store<N>(second_moment + at, v, left);
  if (compute != nullptr) store<N>(compute + at, p, left);
}

template <int N, class T, class G>
__global__ void __launch_bounds__(flat_threads)
    sgd_kernel(T* parameter, __nv_bfloat16* compute, const G* gradient, std::int64_t count, float lr,
               float keep, const StepScale* scale) {
  if (scale->finite == 0) return;
  const float gradient_scale = scale->gradient_scale;
  const std::int64_t at = first_element<N>(), left = count - at;
  if (left <= 0) return;
  const Floats<N> g = load<N>(gradient + at, left);
  Floats<N> p = load<N>(parameter + at, left);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    using namespace ieee;
    p[i] = add(mul(p[i], keep), -mul(lr, mul(g[i], gradient_scale)));
  }
  store<N>(parameter + at, p, left);
  if (compute != nullptr) store<N>(compute + at, p, left);
}

}  // namespace

void adamw(cudaStream_t stream, const AdamWStep& step, Flat parameter, Flat compute, ConstFlat gradient,
           Flat m, Flat v, const StepScale* scale) {
  if (parameter.count == 0) return;
  const bool whole_blocks = !step.stochastic_rounding || step.first_element % wide == 0;
  with_type(parameter.dtype, [&](auto element) {
    using T = decltype(element);
    with_type(gradient.dtype, [&](auto gradient_element) {
      using G = decltype(gradient_element);
      with_width(whole_blocks && all_aligned(parameter, compute, gradient, m, v), [&](auto width) {
        constexpr int N = width;
        GPU_LAUNCH((adamw_kernel<N, T, G>), flat_grid(parameter.count, N), flat_threads, 0, stream,
                   static_cast<T*>(parameter.data), static_cast<__nv_bfloat16*>(compute.data),
                   static_cast<const G*>(gradient.data), static_cast<T*>(m.data), static_cast<T*>(v.data),
                   parameter.count, constants(step), scale, step.stochastic_rounding, step.key,
                   static_cast<std::uint64_t>(step.first_element));
      });
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

void sgd(cudaStream_t stream, float lr, float weight_decay, Flat parameter, Flat compute, ConstFlat gradient,
         const StepScale* scale) {
  if (parameter.count == 0) return;
  const auto keep = static_cast<float>(1.0 - static_cast<double>(lr) * weight_decay);
  with_type(parameter.dtype, [&](auto element) {
    using T = decltype(element);
    with_type(gradient.dtype, [&](auto gradient_element) {
      using G = decltype(gradient_element);
      with_width(all_aligned(parameter, compute, gradient), [&](auto width) {
        constexpr int N = width;
        GPU_LAUNCH((sgd_kernel<N, T, G>), flat_grid(parameter.count, N), flat_threads, 0, stream,
                   static_cast<T*>(parameter.data), static_cast<__nv_bfloat16*>(compute.data),
                   static_cast<const G*>(gradient.data), parameter.count, lr, keep, scale);
      });
    });
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
