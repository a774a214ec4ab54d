// A double-buffered copy with faults that only some schedules turn into wrong numbers.
#include "cuda/kernels/gpu.h"
#include "tests/emulation/kernels.h"

namespace strata::test {

namespace {

constexpr int width = 64;
constexpr int steps = 4;

template <Fault Planted>
__global__ void reverse(float* out, const float* in) {
  SHARED(float, buffer, 2, width);
  const auto i = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int step) {
    if (step < steps) gpu::cp_async<4>(&buffer[step % 2][i], in + step * width + i);
    gpu::cp_async_commit();
  };
  fetch(0);
  fetch(1);
  for (int step = 0; step < steps; ++step) {
    gpu::cp_async_wait<Planted == Fault::wait_short ? 2 : 1>();
    if (Planted != Fault::no_barrier) __syncthreads();
    // Right is to read first and to refill the buffer after all have read.
    if (Planted == Fault::refill_early) fetch(step + 2);
    out[step * width + i] = buffer[step % 2][width - 1 - i];
    __syncthreads();
    if (Planted != Fault::refill_early) fetch(step + 2);
  }
}

}  // namespace

void launch_reverse(float* out, const float* in, Fault fault) {
  if (fault == Fault::none) GPU_LAUNCH((reverse<Fault::none>), 1, width, 0, nullptr, out, in);
  if (fault == Fault::no_barrier) GPU_LAUNCH((reverse<Fault::no_barrier>), 1, width, 0, nullptr, out, in);
  if (fault == Fault::refill_early) GPU_LAUNCH((reverse<Fault::refill_early>), 1, width, 0, nullptr, out, in);
  if (fault == Fault::wait_short) GPU_LAUNCH((reverse<Fault::wait_short>), 1, width, 0, nullptr, out, in);
}

}  // namespace strata::test
