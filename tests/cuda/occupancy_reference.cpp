// NVIDIA's own occupancy calculator (cuda_occupancy.h) on standard input: lines of
//   compute capability major, registers a thread, threads, shared bytes a block (static + dynamic)
// and for each the blocks that fit on a multiprocessor.
#include <cuda_occupancy.h>

#include <cstdio>

namespace {

cudaOccDeviceProp properties(int major) {
  cudaOccDeviceProp p;
  p.computeMajor = major;
  p.computeMinor = 0;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiprocessor = 2048;
  p.regsPerBlock = 65536;
  p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.sharedMemPerBlock = 48 * 1024;
  p.sharedMemPerMultiprocessor = static_cast<size_t>(major == 8 ? 164 : 228) * 1024;
  p.sharedMemPerBlockOptin = static_cast<size_t>(major == 8 ? 163 : 227) * 1024;
  p.reservedSharedMemPerBlock = 1024;
  p.numSms = 100;
  return p;
}

}  // namespace

int main() {
  int major = 0, registers = 0, threads = 0;
  unsigned long shared = 0;
  while (std::scanf("%d %d %d %lu", &major, &registers, &threads, &shared) == 4) {
    const cudaOccDeviceProp device = properties(major);
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    const cudaOccError error =
        cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    std::printf("%d\n", error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
  }
  return 0;
}
