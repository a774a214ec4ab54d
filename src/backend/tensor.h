#pragma once
// Non-owning views of device memory, passed by value. Strides and counts are in elements, never bytes.
#include <cstdint>

#include "base/dtype.h"

namespace strata {

// A contiguous run of `count` elements. Empty (data == nullptr) where an operation documents it as optional.
struct ConstFlat {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t count = 0;
  explicit operator bool() const { return data != nullptr; }
  const void* at(std::int64_t i) const {
    return static_cast<const char*>(data) + i * static_cast<std::int64_t>(size_of(dtype));
  }
  ConstFlat slice(std::int64_t begin, std::int64_t n) const { return {at(begin), dtype, n}; }
  std::int64_t bytes() const { return count * static_cast<std::int64_t>(size_of(dtype)); }
};

struct Flat {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t count = 0;
  explicit operator bool() const { return data != nullptr; }
  operator ConstFlat() const { return {data, dtype, count}; }
  void* at(std::int64_t i) const {
    return static_cast<char*>(data) + i * static_cast<std::int64_t>(size_of(dtype));
  }
  Flat slice(std::int64_t begin, std::int64_t n) const { return {at(begin), dtype, n}; }
  std::int64_t bytes() const { return count * static_cast<std::int64_t>(size_of(dtype)); }
};

// A row-major matrix whose rows start `stride` elements apart (stride >= cols).
struct ConstMatrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, stride = 0;
  explicit operator bool() const { return data != nullptr; }
  const void* at(std::int64_t r, std::int64_t c) const {
    return static_cast<const char*>(data) + (r * stride + c) * static_cast<std::int64_t>(size_of(dtype));
  }
  ConstMatrix block(std::int64_t r, std::int64_t c, std::int64_t nr, std::int64_t nc) const {
    return {at(r, c), dtype, nr, nc, stride};
  }
};

struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, stride = 0;
  explicit operator bool() const { return data != nullptr; }
  operator ConstMatrix() const { return {data, dtype, rows, cols, stride}; }
  void* at(std::int64_t r, std::int64_t c) const {
    return static_cast<char*>(data) + (r * stride + c) * static_cast<std::int64_t>(size_of(dtype));
  }
  Matrix block(std::int64_t r, std::int64_t c, std::int64_t nr, std::int64_t nc) const {
    return {at(r, c), dtype, nr, nc, stride};
  }
};

inline Matrix matrix(void* data, DType dtype, std::int64_t rows, std::int64_t cols) {
  return {data, dtype, rows, cols, cols};
}
inline ConstMatrix matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t cols) {
  return {data, dtype, rows, cols, cols};
}

}  // namespace strata
