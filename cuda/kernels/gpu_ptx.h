// gpu.h as nvcc sees it: macros that are plain CUDA, and one inline function for each PTX instruction used.
// The CPU twins of these functions are in cuda/emulation/kernel_api.h; signatures must stay equal.
#pragma once

#include <cstring>

#define SHARED(T, name, ...) \
  __shared__ __align__(16) typename ::strata::gpu::SharedArray<T __VA_OPT__(, ) __VA_ARGS__>::type name

// One untyped extern array for every kernel: extern __shared__ arrays of one name must have one type in a
// file.
#define DYN_SMEM(T, name)                                                 \
  extern __shared__ __align__(128) unsigned char strata_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(strata_dynamic_shared)

// `kernel` may be parenthesised. Errors are the caller's to read: cudaGetLastError() after the launch.
#define GPU_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, ...) \
  (kernel)<<<(grid), (block), (dynamic_shared_bytes), (stream)>>>(__VA_ARGS__)

namespace strata::gpu {

// ---- 16-byte accesses: p must be 16-byte aligned ----

template <typename T>
__device__ __forceinline__ Vec<T> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T>*>(p);
}

template <typename T>
__device__ __forceinline__ void store_vec(T* p, const Vec<T>& value) {
  *reinterpret_cast<Vec<T>*>(p) = value;
}

// For data read once: evicted first from the caches (ld.cs / st.cs).
template <typename T>
__device__ __forceinline__ Vec<T> load_vec_streaming(const T* p) {
  const int4 raw = __ldcs(reinterpret_cast<const int4*>(p));
  Vec<T> value;
  memcpy(&value, &raw, sizeof value);
  return value;
}

template <typename T>
__device__ __forceinline__ void store_vec_streaming(T* p, const Vec<T>& value) {
  int4 raw;
  memcpy(&raw, &value, sizeof raw);
  __stcs(reinterpret_cast<int4*>(p), raw);
}

// ---- ldmatrix: 8x8 tiles of 16-bit elements from shared memory ----
// Lane i gives the address of one 16-byte row: lanes 0-7 the rows of tile 0, 8-15 of tile 1, and so on (x1
// and x2 ignore the addresses of the lanes above). Lane i receives in register t the elements (i / 4, 2 (i %
// 4)) and its right neighbour of tile t; with _trans those of the transposed tile.

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void ldmatrix_x1(std::uint32_t& r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n"
               : "=r"(r)
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(std::uint32_t& r0, std::uint32_t& r1, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r0), "=r"(r1)
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(std::uint32_t& r0, std::uint32_t& r1, std::uint32_t& r2,
                                            std::uint32_t& r3, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x1_trans(std::uint32_t& r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n"
               : "=r"(r)
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(std::uint32_t& r0, std::uint32_t& r1, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r0), "=r"(r1)
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t& r0, std::uint32_t& r1, std::uint32_t& r2,
                                                  std::uint32_t& r3, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared_address(row))
               : "memory");
}

// ---- mma: D += A B on one warp ----
// With g = lane / 4 and t = lane % 4:
//   bf16 m16n8k16: a0 (g, 2t..) a1 (g+8, 2t..) a2 (g, 2t+8..) a3 (g+8, 2t+8..); b0 (k 2t.., n g) b1 (k
//   2t+8.., n g) tf32 m16n8k8:  a0 (g, t) a1 (g+8, t) a2 (g, t+4) a3 (g+8, t+4); b0 (k t, n g) b1 (k t+4, n
//   g) both:          d0 (g, 2t) d1 (g, 2t+1) d2 (g+8, 2t) d3 (g+8, 2t+1)

__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Operands are fp32 bit patterns; the hardware reads their tf32 part (10 mantissa bits).
__device__ __forceinline__ void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- cp.async: global to shared memory without registers ----
// Copies source_bytes (0 to Bytes) and fills the rest of the Bytes with zeros; both addresses are
// Bytes-aligned. Visible to the issuing thread after cp_async_wait, to the others after a barrier that
// follows it.

template <int Bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int source_bytes = Bytes) {
  static_assert(Bytes == 16 || Bytes == 8 || Bytes == 4);
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared_address(shared)), "l"(global),
                 "n"(Bytes), "r"(source_bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most `Pending` of this thread's newest groups are unfinished.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Also waits for copies that were never committed.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// ---- arithmetic ----

// 2^x by the special function unit: about 2 ulp, denormal results flushed to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// ---- host ----

// A kernel that launches with more than 48 KiB of dynamic shared memory must ask for it once before.
template <typename... Parameters>
cudaError_t allow_shared_bytes(void (*kernel)(Parameters...), std::size_t bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace strata::gpu
