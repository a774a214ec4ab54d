// A program that ends with AddressSanitizer's report when it is compiled in mode `asan` and the sanitizer
// works in fibers. The argument chooses the array that is overrun: device, shared or local.
#include "cuda/kernels/gpu.h"
#include "tests/support/device_array.h"

#include <cstdio>
#include <cstring>

namespace {

__global__ void overrun(float* out, int which, int past) {
  SHARED(float, shared, 40);
  float local[8];
  for (int i = 0; i < 8; ++i) local[i] = static_cast<float>(i);
  shared[threadIdx.x] = 1;
  __syncthreads();
  if (which == 0) out[127 + past] = 1;
  if (which == 1) out[threadIdx.x] = shared[39 + past];
  if (which == 2) out[threadIdx.x] = local[7 + past];
}

}  // namespace

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "";
  const int which = std::strcmp(name, "device") == 0 ? 0 : std::strcmp(name, "shared") == 0 ? 1 : 2;
  const strata::test::DeviceArray<float> out(128);
  GPU_LAUNCH(overrun, 1, 32, 0, nullptr, out.data(), which, 0);
  std::puts("nothing overrun yet");
  std::fflush(stdout);
  GPU_LAUNCH(overrun, 1, 32, 0, nullptr, out.data(), which, 1);
  std::puts("the overrun went unseen");
}
