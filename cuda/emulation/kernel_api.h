// gpu.h as g++ sees it: the names of CUDA C++ that kernels use, each a call into the executor
// (cuda/emulation/executor.h). Functions take a trailing Where that callers never write: it defaults to their
// own file and line, for reports.
#pragma once

#include "cuda/emulation/kernel_math.h"
#include "cuda/emulation/launch.h"

#include <cstring>
#include <type_traits>

#undef __launch_bounds__
#define __launch_bounds__(...)

extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;
inline constexpr int warpSize = 32;

// The lambda's static gives every declaration (and every instance of a kernel template) an address of its own
// as key.
#define SHARED(T, name, ...)                                                                           \
  auto& name = *static_cast<typename ::strata::gpu::SharedArray<T __VA_OPT__(, ) __VA_ARGS__>::type*>( \
      ::strata::emulation::static_shared(                                                              \
          [] {                                                                                         \
            static const char key = 0;                                                                 \
            return static_cast<const void*>(&key);                                                     \
          }(),                                                                                         \
          sizeof(typename ::strata::gpu::SharedArray<T __VA_OPT__(, ) __VA_ARGS__>::type), #name,      \
          ::strata::emulation::Where::here()))

#define DYN_SMEM(T, name) \
  T* const name = static_cast<T*>(::strata::emulation::dynamic_shared(::strata::emulation::Where::here()))

#define GPU_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, ...)                        \
  ::strata::emulation::launch(kernel, #kernel, (grid), (block), (dynamic_shared_bytes), (stream), \
                              ::strata::emulation::Where::here() __VA_OPT__(, ) __VA_ARGS__)

// ---- barriers and fences ----

inline void __syncthreads(strata::emulation::Where where = strata::emulation::Where::here()) {
  strata::emulation::block_barrier(strata::emulation::BarrierKind::plain, 0, where);
}
inline int __syncthreads_count(int predicate,
                               strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::block_barrier(strata::emulation::BarrierKind::count, predicate, where);
}
inline int __syncthreads_and(int predicate,
                             strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::block_barrier(strata::emulation::BarrierKind::all, predicate, where);
}
inline int __syncthreads_or(int predicate,
                            strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::block_barrier(strata::emulation::BarrierKind::any, predicate, where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       strata::emulation::Where where = strata::emulation::Where::here()) {
  strata::emulation::warp_sync(mask, where);
}
inline void __threadfence() {
  strata::emulation::memory_fence();
}
inline void __threadfence_block() {
  strata::emulation::memory_fence();
}

// ---- warp shuffles and votes ----

namespace strata::emulation {

template <typename T>
T shuffle(ShuffleKind kind, unsigned mask, T value, int lane, int width, Where where) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move 32 or 64 bits");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_shuffle(kind, mask, bits, lane, width, where);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace strata::emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int source_lane, int width = 32,
              strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::shuffle(strata::emulation::ShuffleKind::index, mask, value, source_lane, width,
                                    where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::shuffle(strata::emulation::ShuffleKind::exclusive_or, mask, value, lane_mask,
                                    width, where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::shuffle(strata::emulation::ShuffleKind::down, mask, value,
                                    static_cast<int>(delta), width, where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::shuffle(strata::emulation::ShuffleKind::up, mask, value, static_cast<int>(delta),
                                    width, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::warp_ballot(mask, predicate, where);
}
inline int __any_sync(unsigned mask, int predicate,
                      strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::warp_ballot(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      strata::emulation::Where where = strata::emulation::Where::here()) {
  return strata::emulation::warp_ballot(mask, !predicate, where) == 0;
}

// ---- atomics: defined in atomics.cpp for the types named there ----

#define STRATA_EMULATED_ATOMIC(name, op, T)                                                                 \
  inline T name(T* address, T operand, strata::emulation::Where where = strata::emulation::Where::here()) { \
    return strata::emulation::atomic_update(address, strata::emulation::AtomicOp::op, operand,              \
                                            static_cast<T>(0), where);                                      \
  }
#define STRATA_EMULATED_INTEGER_ATOMICS(T)      \
  STRATA_EMULATED_ATOMIC(atomicAdd, add, T)     \
  STRATA_EMULATED_ATOMIC(atomicMax, maximum, T) \
  STRATA_EMULATED_ATOMIC(atomicMin, minimum, T) \
  STRATA_EMULATED_ATOMIC(atomicExch, exchange, T)
STRATA_EMULATED_INTEGER_ATOMICS(int)
STRATA_EMULATED_INTEGER_ATOMICS(unsigned)
STRATA_EMULATED_INTEGER_ATOMICS(unsigned long long)
STRATA_EMULATED_ATOMIC(atomicAdd, add, float)
STRATA_EMULATED_ATOMIC(atomicAdd, add, double)
STRATA_EMULATED_ATOMIC(atomicExch, exchange, float)
STRATA_EMULATED_ATOMIC(atomicInc, increment, unsigned)
#undef STRATA_EMULATED_INTEGER_ATOMICS
#undef STRATA_EMULATED_ATOMIC

#define STRATA_EMULATED_CAS(T)                                                                             \
  inline T atomicCAS(T* address, T compare, T value,                                                       \
                     strata::emulation::Where where = strata::emulation::Where::here()) {                  \
    return strata::emulation::atomic_update(address, strata::emulation::AtomicOp::compare_and_swap, value, \
                                            compare, where);                                               \
  }
STRATA_EMULATED_CAS(int)
STRATA_EMULATED_CAS(unsigned)
STRATA_EMULATED_CAS(unsigned long long)
#undef STRATA_EMULATED_CAS

// ---- loads and stores with cache hints: any type of 1 to 16 bytes ----

template <typename T>
T __ldg(const T* p, strata::emulation::Where where = strata::emulation::Where::here()) {
  strata::emulation::check_alignment(p, sizeof(T), where);
  return *p;
}
template <typename T>
T __ldcg(const T* p, strata::emulation::Where where = strata::emulation::Where::here()) {
  return __ldg(p, where);
}
template <typename T>
T __ldcs(const T* p, strata::emulation::Where where = strata::emulation::Where::here()) {
  return __ldg(p, where);
}
template <typename T>
void __stcg(T* p, std::type_identity_t<T> value,
            strata::emulation::Where where = strata::emulation::Where::here()) {
  strata::emulation::check_alignment(p, sizeof(T), where);
  *p = value;
}
template <typename T>
void __stcs(T* p, std::type_identity_t<T> value,
            strata::emulation::Where where = strata::emulation::Where::here()) {
  __stcg(p, value, where);
}

// ---- the twins of gpu_ptx.h ----

namespace strata::gpu {

using emulation::Where;

template <typename T>
Vec<T> load_vec(const T* p, Where where = Where::here()) {
  emulation::vector_access(p, where);
  return *reinterpret_cast<const Vec<T>*>(p);
}
template <typename T>
void store_vec(T* p, const Vec<std::type_identity_t<T>>& value, Where where = Where::here()) {
  emulation::vector_access(p, where);
  *reinterpret_cast<Vec<T>*>(p) = value;
}
template <typename T>
Vec<T> load_vec_streaming(const T* p, Where where = Where::here()) {
  return load_vec(p, where);
}
template <typename T>
void store_vec_streaming(T* p, const Vec<std::type_identity_t<T>>& value, Where where = Where::here()) {
  store_vec(p, value, where);
}

inline void ldmatrix_x1(std::uint32_t& r, const void* row, Where where = Where::here()) {
  emulation::warp_ldmatrix(&r, 1, false, row, where);
}
inline void ldmatrix_x1_trans(std::uint32_t& r, const void* row, Where where = Where::here()) {
  emulation::warp_ldmatrix(&r, 1, true, row, where);
}
inline void ldmatrix_x2(std::uint32_t& r0, std::uint32_t& r1, const void* row, Where where = Where::here()) {
  std::uint32_t r[2];
  emulation::warp_ldmatrix(r, 2, false, row, where);
  r0 = r[0], r1 = r[1];
}
inline void ldmatrix_x2_trans(std::uint32_t& r0, std::uint32_t& r1, const void* row,
                              Where where = Where::here()) {
  std::uint32_t r[2];
  emulation::warp_ldmatrix(r, 2, true, row, where);
  r0 = r[0], r1 = r[1];
}
inline void ldmatrix_x4(std::uint32_t& r0, std::uint32_t& r1, std::uint32_t& r2, std::uint32_t& r3,
                        const void* row, Where where = Where::here()) {
  std::uint32_t r[4];
  emulation::warp_ldmatrix(r, 4, false, row, where);
  r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
inline void ldmatrix_x4_trans(std::uint32_t& r0, std::uint32_t& r1, std::uint32_t& r2, std::uint32_t& r3,
                              const void* row, Where where = Where::here()) {
  std::uint32_t r[4];
  emulation::warp_ldmatrix(r, 4, true, row, where);
  r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}

inline void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                     Where where = Where::here()) {
  emulation::warp_mma_bf16(d, a, b0, b1, where);
}
inline void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                     Where where = Where::here()) {
  emulation::warp_mma_tf32(d, a, b0, b1, where);
}

template <int Bytes>
void cp_async(void* shared, const void* global, int source_bytes = Bytes, Where where = Where::here()) {
  static_assert(Bytes == 16 || Bytes == 8 || Bytes == 4);
  emulation::copy_async(shared, global, Bytes, source_bytes, where);
}
inline void cp_async_commit() {
  emulation::copy_async_commit();
}
template <int Pending>
void cp_async_wait() {
  emulation::copy_async_wait(Pending);
}
inline void cp_async_wait_all() {
  emulation::copy_async_wait_all();
}

inline float exp2_approx(float x) {
  return emulation::exp2_flushed(x);
}

template <typename... Parameters>
cudaError_t allow_shared_bytes(void (*kernel)(Parameters...), std::size_t bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace strata::gpu
