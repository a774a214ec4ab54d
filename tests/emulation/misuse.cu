// One kernel for each way of using the device wrongly. A mark "at:<name>" stands at each line that a report
// must name.
#include "cuda/kernels/gpu.h"
#include "tests/emulation/kernels.h"
#include "tests/support/device_array.h"

namespace strata::test {

namespace {

__global__ void two_barriers(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();  // at:barrier
  } else {
    __syncthreads();  // at:barrier2
  }
  out[0] = 1;
}

__global__ void two_shuffles(int* out) {
  const auto lane = static_cast<int>(threadIdx.x);
  int value;
  if (lane % 2 == 0) {
    value = __shfl_xor_sync(gpu::full_warp, lane, 1);  // at:collective
  } else {
    value = __shfl_down_sync(gpu::full_warp, lane, 1);  // at:collective2
  }
  out[lane] = value;
}

__global__ void deadlock(int* out) {
  if (threadIdx.x == 3) {
    __syncthreads();  // at:deadlock
  } else {
    __syncwarp();  // at:deadlock2
  }
  out[0] = 1;
}

__global__ void other_mask(int* out) {
  if (threadIdx.x < 16) __syncwarp(0x0000000fu);  // at:mask
  out[0] = 1;
}

__global__ void absent_lane(int* out) {
  const auto lane = static_cast<int>(threadIdx.x);
  if (lane < 16) out[lane] = __shfl_sync(0x0000ffffu, lane, 20);  // at:absent
}

__global__ void odd_width(int* out) {
  out[threadIdx.x] = __shfl_xor_sync(gpu::full_warp, 1, 1, 12);  // at:width
}

__global__ void half_warp_mma(float* out) {
  float d[4] = {};
  const std::uint32_t a[4] = {};
  if (threadIdx.x < 16) return;
  gpu::mma_bf16(d, a, 0, 0);  // at:mma
  out[threadIdx.x] = d[0];
}

__global__ void skewed_ldmatrix(int* out) {
  SHARED(std::uint16_t, tile, 9, 8);
  std::uint32_t r;
  gpu::ldmatrix_x1(r, &tile[threadIdx.x % 8][threadIdx.x == 5]);  // at:ldmatrix
  out[threadIdx.x] = static_cast<int>(r);
}

__global__ void global_ldmatrix(int* out) {
  std::uint32_t r;
  gpu::ldmatrix_x1(r, out);  // at:ldglobal
  out[threadIdx.x] = static_cast<int>(r);
}

__global__ void skewed_copy(int* out) {
  SHARED(int, tile, 8);
  gpu::cp_async<16>(tile, out + 1);  // at:copy
  gpu::cp_async_wait_all();
  out[0] = tile[0];
}

__global__ void copy_past_source(int* out) {
  SHARED(int, tile, 8);
  gpu::cp_async<16>(tile, out + 64 - 4 + 4 * threadIdx.x);  // at:source
  gpu::cp_async_wait_all();
  out[0] = tile[0];
}

__global__ void copy_past_shared(int* out) {
  SHARED(int, tile, 6);
  gpu::cp_async<16>(tile + 4, out);  // at:destination
  gpu::cp_async_wait_all();
  out[0] = tile[0];
}

__global__ void skewed_vector(float* out) {
  gpu::store_vec(out + 2, gpu::Vec<float>{});  // at:vector
}

__global__ void skewed_load(float* out) {
  out[0] = __ldg(reinterpret_cast<const float2*>(out + 1)).x;  // at:ldg
}

__global__ void dynamic(float* out) {
  DYN_SMEM(float, buffer);  // at:nodynamic
  buffer[threadIdx.x] = 2;
  out[threadIdx.x] = buffer[threadIdx.x];
}

__global__ void large_fixed(float* out) {
  SHARED(float, buffer, 12, 1025);  // at:fixed
  buffer[0][threadIdx.x] = 2;
  out[threadIdx.x] = buffer[0][threadIdx.x];
}

__global__ void mixed_shared(float* out) {
  SHARED(float, fixed, 1024);  // at:mixed
  DYN_SMEM(float, buffer);
  fixed[threadIdx.x] = buffer[threadIdx.x] = 2;
  out[threadIdx.x] = fixed[threadIdx.x];
}

// An instance of its own, so that its attribute does not reach `dynamic`.
__global__ void large_dynamic(float* out) {
  DYN_SMEM(float, buffer);
  buffer[25599 - threadIdx.x] = 2;
  out[threadIdx.x] = buffer[25599 - threadIdx.x];
}

__global__ void fill(int* out) {
  out[threadIdx.x] = 1;
}

template <typename T>
void launch_on(void (*kernel)(T*), dim3 grid, dim3 block, std::size_t shared = 0) {
  const DeviceArray<T> out(64);
  GPU_LAUNCH(kernel, grid, block, shared, nullptr, out.data());  // at:launch
}

}  // namespace

std::vector<MisuseCase> misuse_cases() {
  return {
      {"divergent barrier", {"barrier", "barrier2"}, [] { launch_on(two_barriers, 1, 64); }},
      {"divergent warp collective", {"collective", "collective2"}, [] { launch_on(two_shuffles, 1, 32); }},
      {"deadlock", {"deadlock", "deadlock2"}, [] { launch_on(deadlock, 1, 32); }},
      {"not in the mask 0x0000000f", {"mask"}, [] { launch_on(other_mask, 1, 32); }},
      {"reads lane 20", {"absent"}, [] { launch_on(absent_lane, 1, 32); }},
      {"width 12", {"width"}, [] { launch_on(odd_width, 1, 32); }},
      {"needs all 32 lanes", {"mma"}, [] { launch_on(half_warp_mma, 1, 32); }},
      {"needs all 32 lanes", {"ldmatrix"}, [] { launch_on(skewed_ldmatrix, 1, 5); }},
      {"misaligned 16-byte access", {"ldmatrix"}, [] { launch_on(skewed_ldmatrix, 1, 32); }},
      {"does not lie in one shared array", {"ldglobal"}, [] { launch_on(global_ldmatrix, 1, 32); }},
      {"misaligned 16-byte access", {"copy"}, [] { launch_on(skewed_copy, 1, 1); }},
      {"does not lie in one device allocation", {"source"}, [] { launch_on(copy_past_source, 1, 2); }},
      {"does not lie in one shared array", {"destination"}, [] { launch_on(copy_past_shared, 1, 1); }},
      {"misaligned 16-byte access", {"vector"}, [] { launch_on(skewed_vector, 1, 1); }},
      {"misaligned 8-byte access", {"ldg"}, [] { launch_on(skewed_load, 1, 1); }},
      {"0 bytes of dynamic shared memory", {"nodynamic"}, [] { launch_on(dynamic, 1, 32); }},
      {"arrays of fixed size may take 49152", {"fixed"}, [] { launch_on(large_fixed, 1, 32); }},
      {"more than 49152 bytes need", {"mixed"}, [] { launch_on(mixed_shared, 1, 32, 46 * 1024); }},
      {"but 49152 are allowed", {"launch"}, [] { launch_on(dynamic, 1, 32, 49153); }},
      {"at most 166912", {"launch"}, [] { launch_on(dynamic, 1, 32, 200 * 1024); }},
      {"at most 1024 threads", {"launch"}, [] { launch_on(fill, 1, dim3(32, 33)); }},
      {"an empty grid", {"launch"}, [] { launch_on(fill, dim3(0), 32); }},
      {"an empty grid", {"launch"}, [] { launch_on(fill, dim3(4, 0), 32); }},
      {"an empty block", {"launch"}, [] { launch_on(fill, 1, dim3(32, 0)); }},
      {"in no device allocation",
       {"host"},
       [] {
         std::vector<int> host(64);
         GPU_LAUNCH(fill, 1, 32, 0, nullptr, host.data());  // at:host
       }},
  };
}

void launch_large_dynamic() {
  const DeviceArray<float> out(32);
  check(gpu::allow_shared_bytes(large_dynamic, 100 * 1024), "allow_shared_bytes");
  GPU_LAUNCH(large_dynamic, 1, 32, 100 * 1024, nullptr, out.data());
}

void launch_fill(int threads) {
  const DeviceArray<int> out(64);
  GPU_LAUNCH(fill, 1, threads, 0, nullptr, out.data());
}

}  // namespace strata::test
