// Pseudo-gradient and outer optimizers on flat buffers, the same bits as the CPU's.
//
// Shapes: n elements. pseudo_gradient reads 8 n and writes 4 n bytes of fp32. outer_step reads theta_old,
// delta and momentum (12 n), and theta when it is mixed in (4 n); it writes theta_old, momentum, theta and
// the bf16 copy (14 n). Tile: eight elements a thread. Operands keep their dtype at run time: the branch is
// the same for the whole grid and runs once an aggregation, where templates would make thirty-two kernels of
// two.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/launch.h"

#include "backend/random.h"

namespace strata::gpu {
namespace {

__device__ __forceinline__ ConstFlat constant(const Flat& x) {
  return {x.data, x.dtype, x.count};
}
template <int N>
__device__ __forceinline__ Floats<N> read(const ConstFlat& x, std::int64_t at) {
  const std::int64_t left = x.count - at;
  return x.dtype == DType::bf16 ? load<N>(static_cast<const __nv_bfloat16*>(x.data) + at, left)
                                : load<N>(static_cast<const float*>(x.data) + at, left);
}
template <int N>
__device__ __forceinline__ void write(const Flat& x, std::int64_t at, const Floats<N>& values) {
  const std::int64_t left = x.count - at;
  if (x.dtype == DType::bf16) {
    store<N>(static_cast<__nv_bfloat16*>(x.data) + at, values, left);
  } else {
    store<N>(static_cast<float*>(x.data) + at, values, left);
  }
}

template <int N>
__global__ void __launch_bounds__(flat_threads)
    pseudo_gradient_kernel(Flat delta, ConstFlat theta_old, ConstFlat theta) {
  const std::int64_t at = first_element<N>();
  if (at >= delta.count) return;
  Floats<N> result = read<N>(theta_old, at);
  const Floats<N> now = read<N>(theta, at);
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] -= now[i];
  write<N>(delta, at, result);
}

// One element: returns the new global value and updates the rule's state.
__device__ __forceinline__ float outer_rule(const OuterStep& step, float old, float change, float& state) {
  using namespace ieee;
  switch (step.rule) {
    case OuterRule::fedavg:
      return add(old, -mul(step.eta, change));
    case OuterRule::fedavgm:
      state = add(mul(step.momentum, state), change);
      return add(old, -mul(step.eta, state));
    case OuterRule::fedmom: {
      const float v = add(old, -mul(step.eta, change));
      const float next = add(v, mul(step.momentum, add(v, -state)));
      state = v;
      return next;
    }
    case OuterRule::diloco:
      state = add(mul(step.momentum, state), change);
      return add(old, -mul(step.eta, add(change, mul(step.momentum, state))));
  }
  return old;
}

template <int N>
__global__ void __launch_bounds__(flat_threads)
    outer_step_kernel(OuterStep step, Flat theta, Flat compute, Flat theta_old, Flat momentum,
                      ConstFlat delta) {
  const std::int64_t at = first_element<N>();
  if (at >= theta.count) return;
  const Floats<N> change = read<N>(delta, at);
  Floats<N> next = read<N>(constant(theta_old), at);
  const bool has_state = step.rule != OuterRule::fedavg;
  Floats<N> state{};
  if (has_state) state = read<N>(constant(momentum), at);
#pragma unroll
  for (int i = 0; i < N; ++i) next[i] = outer_rule(step, next[i], change[i], state[i]);
  if (has_state) write<N>(momentum, at, state);
  write<N>(theta_old, at, next);
  if (step.alpha != 0.0f) {
    const Floats<N> local = read<N>(constant(theta), at);
    const float rest = 1.0f - step.alpha;
#pragma unroll
    for (int i = 0; i < N; ++i)
      next[i] = ieee::add(ieee::mul(step.alpha, local[i]), ieee::mul(rest, next[i]));
  }
  write<N>(theta, at, next);
  if (compute.data != nullptr) write<N>(compute, at, next);
}

}  // namespace

void pseudo_gradient(cudaStream_t stream, Flat delta, ConstFlat theta_old, ConstFlat theta) {
  if (delta.count == 0) return;
  with_width(all_aligned(delta, theta_old, theta), [&](auto width) {
    constexpr int N = width;
    GPU_LAUNCH((pseudo_gradient_kernel<N>), flat_grid(delta.count, N), flat_threads, 0, stream, delta,
               theta_old, theta);
  });
  STRATA_CUDA(cudaGetLastError());
}

void outer_step(cudaStream_t stream, const OuterStep& step, Flat theta, Flat compute, Flat theta_old,
                Flat momentum, ConstFlat delta) {
  if (theta.count == 0) return;
  with_width(all_aligned(theta, compute, theta_old, momentum, delta), [&](auto width) {
    constexpr int N = width;
    GPU_LAUNCH((outer_step_kernel<N>), flat_grid(theta.count, N), flat_threads, 0, stream, step, theta,
               compute, theta_old, momentum, delta);
  });
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace strata::gpu
