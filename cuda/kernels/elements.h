#pragma once
// Elements of fp32 or bf16 as fp32 values in registers: what every kernel but attention loads and stores.
//
// A kernel is compiled for two widths. N = 8: a thread moves eight neighbours by 16-byte accesses (one for
// bf16, two for fp32); every pointer is then 16-byte aligned and every row stride a multiple of 8, which the
// model's own tensors always are; a last group of fewer than eight goes element by element. N = 1: any
// alignment.
#include "cuda/kernels/gpu.h"

namespace strata::gpu {

inline constexpr int wide = 8;

template <int N>
struct Floats {
  float v[N];
  __device__ __forceinline__ float& operator[](int i) { return v[i]; }
  __device__ __forceinline__ const float& operator[](int i) const { return v[i]; }
};

__device__ __forceinline__ float widen(float x) {
  return x;
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <class T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (sizeof(T) == 2) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}
// x as it would come back from memory of type T.
template <class T>
__device__ __forceinline__ float rounded_to(float x) {
  return widen(narrow<T>(x));
}

// The first `count` of N elements at p (all when count >= N); the others are `rest`.
template <int N, class T>
__device__ __forceinline__ Floats<N> load(const T* p, std::int64_t count, float rest = 0.0f) {
  Floats<N> x;
  if constexpr (N > 1) {
    if (count >= N) {
#pragma unroll
      for (int k = 0; k < N; k += Vec<T>::size) {
        const Vec<T> part = load_vec(p + k);
#pragma unroll
        for (int i = 0; i < Vec<T>::size; ++i) x[k + i] = widen(part[i]);
      }
      return x;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = i < count ? widen(p[i]) : rest;
  return x;
}

// Stores the first `count` of N values (all when count >= N), rounded to nearest even.
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Floats<N>& x, std::int64_t count) {
  if constexpr (N > 1) {
    if (count >= N) {
#pragma unroll
      for (int k = 0; k < N; k += Vec<T>::size) {
        Vec<T> part;
#pragma unroll
        for (int i = 0; i < Vec<T>::size; ++i) part[i] = narrow<T>(x[k + i]);
        store_vec(p + k, part);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) p[i] = narrow<T>(x[i]);
  }
}

// A matrix as a kernel argument: row r starts at data + r * stride.
template <class T>
struct Rows {
  T* data;
  std::int64_t stride;
  __device__ __forceinline__ T* row(std::int64_t r) const { return data + r * stride; }
  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }
};

// The first of the N elements of a flat buffer that this thread works on.
template <int N>
__device__ __forceinline__ std::int64_t first_element() {
  return (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
}

}  // namespace strata::gpu
