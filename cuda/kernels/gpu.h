// The one header every kernel file (.cu) includes.
//
// A kernel is written once, in CUDA C++, against what this header names. nvcc compiles it for the GPU
// (gpu_ptx.h: thin wrappers of one PTX instruction each); g++ with STRATA_EMULATE compiles the same file for
// the CPU (cuda/emulation), where the same names follow the lane layouts that the PTX ISA documents.
//
// What a kernel file may use
//   __global__ __device__ __forceinline__ __restrict__ __launch_bounds__ __align__, threadIdx blockIdx
//   blockDim gridDim SHARED(T, name, dims...)   block-shared array `T name[dims]...`, 16-byte aligned; no
//   dims: one T DYN_SMEM(T, name)          `T* name`: the launch's dynamic shared memory, 128-byte aligned
//   GPU_LAUNCH((kernel<2, 3>), grid, block, dynamic_shared_bytes, stream, arguments...)   parentheses hold
//   template commas
//   __syncthreads() _count/_and/_or, __syncwarp(mask), __threadfence() and _block
//   __shfl_sync __shfl_xor_sync __shfl_down_sync __shfl_up_sync (32 and 64 bits), __ballot_sync __any_sync
//   __all_sync atomicAdd (int, unsigned, unsigned long long, float), atomicCAS, atomicMax, atomicMin,
//   atomicExch, atomicInc
//   __ldg __ldcg __ldcs __stcg __stcs, __float_as_uint and kin, __fmaf_rn __fmul_rn __fadd_rn ..., __expf
//   __logf rsqrtf bf16: __nv_bfloat16 and the conversions of cuda_bf16.h
// and, in namespace strata::gpu, below and in gpu_ptx.h:
//   Vec<T>, load_vec, store_vec, load_vec_streaming, store_vec_streaming     one 16-byte access
//   ldmatrix_x1/_x2/_x4 and ..._trans, mma_bf16 (m16n8k16), mma_tf32 (m16n8k8)
//   cp_async<16|8|4>(smem, gmem, source_bytes), cp_async_commit(), cp_async_wait<N>(), cp_async_wait_all()
//   pack_bf16x2, unpack_bf16x2, exp2_approx, allow_shared_bytes(kernel, bytes)
// Anything else (inline PTX of your own, textures, cooperative groups, thread block clusters) does not exist
// in emulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace strata::gpu {

inline constexpr int warp_size = 32;
inline constexpr unsigned full_warp = 0xffffffffu;

// T[a][b]... as a type, so that SHARED can declare an array of any rank in both compilations.
template <typename T, int... Dims>
struct SharedArray {
  using type = T;
};
template <typename T, int First, int... Rest>
struct SharedArray<T, First, Rest...> {
  using type = typename SharedArray<T, Rest...>::type[First];
};

// Sixteen bytes of T, moved by one instruction. T has 1, 2, 4, 8 or 16 bytes.
template <typename T>
struct alignas(16) Vec {
  static_assert(16 % sizeof(T) == 0, "a Vec is exactly 16 bytes");
  static constexpr int size = static_cast<int>(16 / sizeof(T));
  T v[16 / sizeof(T)];
  __host__ __device__ __forceinline__ T& operator[](int i) { return v[i]; }
  __host__ __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};

}  // namespace strata::gpu

#if defined(STRATA_EMULATE)
#include "cuda/emulation/kernel_api.h"
#elif defined(__CUDACC__)
#include "cuda/kernels/gpu_ptx.h"
#else
#error "gpu.h is for kernel files: compile with nvcc, or with g++ -DSTRATA_EMULATE (cuda/emulation/README.md)"
#endif

namespace strata::gpu {

// Two floats, each rounded to nearest even bf16, in one register: `low` in the lower half, as mma and
// ldmatrix order them.
__device__ __forceinline__ std::uint32_t pack_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  std::uint32_t bits;
  static_assert(sizeof bits == sizeof pair);
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// The two bf16 of one register as floats: exact.
__device__ __forceinline__ float2 unpack_bf16x2(std::uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

}  // namespace strata::gpu
