#pragma once
// Host side of a kernel file: from views with a dtype to kernel templates, and sizes of grids.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "backend/tensor.h"
#include "cuda/check.h"
#include "cuda/kernels/elements.h"

namespace strata::gpu {

// f(T{}) with the C++ type of the dtype. Throws InternalError for other dtypes than fp32 and bf16.
template <class F>
void with_type(DType type, F&& f) {
  if (type == DType::bf16) {
    f(__nv_bfloat16{});
  } else if (type == DType::f32) {
    f(float{});
  } else {
    throw InternalError(std::string("a kernel was given ") + name_of(type) +
                        ", allowed is fp32 or bf16 -> a fault of the caller; report it");
  }
}

// f(std::integral_constant<int, N>{}): elements.h says what the widths are.
template <class F>
void with_width(bool vectors, F&& f) {
  if (vectors) {
    f(std::integral_constant<int, wide>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

inline bool aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}
inline bool aligned(const ConstFlat& x) {
  return aligned(x.data);
}
inline bool aligned(const ConstMatrix& x) {
  return aligned(x.data) && (x.rows <= 1 || x.stride % wide == 0);
}
template <class... Views>
bool all_aligned(const Views&... views) {
  return (aligned(views) && ...);
}

template <class T>
Rows<T> rows_of(const Matrix& x) {
  return {static_cast<T*>(x.data), x.stride};
}
template <class T>
Rows<const T> rows_of(const ConstMatrix& x) {
  return {static_cast<const T*>(x.data), x.stride};
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Threads for a row of `columns` with at most `groups` groups of `width` elements a thread, if `most` allow
// it.
inline int row_threads(std::int64_t columns, int width, int groups, int most) {
  const std::int64_t needed = ceil_div(ceil_div(columns, width), groups);
  return static_cast<int>(std::clamp<std::int64_t>(ceil_div(needed, warp_size) * warp_size, warp_size, most));
}

// A grid's first extent, which may be 2^31 - 1. Throws InternalError beyond.
inline unsigned grid_size(std::int64_t blocks) {
  if (blocks > 0x7fffffff) {
    throw InternalError("a kernel would need " + std::to_string(blocks) +
                        " blocks, the device allows 2147483647 -> a fault of the caller; report it");
  }
  return static_cast<unsigned>(blocks);
}

// Threads of a block of the elementwise kernels: eight warps, so that any multiple of them fills an SM.
inline constexpr int flat_threads = 256;

inline unsigned flat_grid(std::int64_t count, int width) {
  return grid_size(ceil_div(count, std::int64_t{flat_threads} * width));
}

}  // namespace strata::gpu
