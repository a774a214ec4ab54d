// Host side of the attention kernels: what a call must satisfy, and views of its matrices.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <string>

#include "backend/ops.h"
#include "base/error.h"

namespace strata::gpu {

// The checks of both directions: shapes, dtypes, and extents that fit the kernels' 32-bit positions and
// grids. Throws InternalError.
class AttentionCheck {
 public:
  AttentionCheck(const char* operation, const AttentionShape& s, DType dtype)
      : operation_(operation), dtype_(dtype) {
    that(s.batch > 0 && s.sequence > 0 && s.query_heads > 0 && s.key_value_heads > 0, "the shape is empty");
    that(s.query_heads % s.key_value_heads == 0, "query heads are not a multiple of key/value heads");
    that(s.head_size >= 2 && s.head_size <= 256 && s.head_size % 2 == 0,
         "the head size is not even in [2, 256]");
    that(s.sequence <= 65535 * 64, "the sequence is longer than 4194240, 65535 tiles of 64 rows");
    that(s.batch * s.query_heads <= 0x7fffffff, "batch times query heads passes 2147483647");
    that(dtype == DType::f32 || dtype == DType::bf16, "the dtype is neither fp32 nor bf16");
  }
  void matrix(const char* name, const ConstMatrix& x, std::int64_t rows, std::int64_t cols) const {
    const std::string called(name);
    that(x.data != nullptr, called + " is missing");
    that(x.rows == rows && x.cols == cols, called + " is " + std::to_string(x.rows) + " x " +
                                               std::to_string(x.cols) + ", expected " + std::to_string(rows) +
                                               " x " + std::to_string(cols));
    that(x.stride >= x.cols, called + " has a stride below its columns");
    that(x.dtype == dtype_, called + " is " + name_of(x.dtype) + ", q is " + name_of(dtype_));
  }
  void that(bool holds, const std::string& found) const {
    if (!holds)
      throw InternalError(std::string(operation_) + ": " + found + " -> a fault of the caller; report it");
  }

 private:
  const char* operation_;
  DType dtype_;
};

// What the kernels take of a shape.
struct AttentionSizes {
  explicit AttentionSizes(const AttentionShape& s)
      : sequence(static_cast<int>(s.sequence)),
        query_heads(static_cast<int>(s.query_heads)),
        key_value_heads(static_cast<int>(s.key_value_heads)),
        group(static_cast<int>(s.query_heads / s.key_value_heads)),
        head_size(static_cast<int>(s.head_size)),
        scale(static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_size)))) {}
  int sequence, query_heads, key_value_heads;
  int group;  // query heads that share a key/value head
  int head_size;
  float scale;
};

// attention_forward.cu, attention_backward.cu, attention_plain.cu: arguments checked by attention.cu.
namespace flash {
void forward(cudaStream_t stream, const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q,
             ConstMatrix k, ConstMatrix v);
void backward(cudaStream_t stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
              ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
              ConstMatrix v, float* delta);
}  // namespace flash
namespace plain {
void forward(cudaStream_t stream, const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q,
             ConstMatrix k, ConstMatrix v);
void backward(cudaStream_t stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
              ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
              ConstMatrix v, float* delta);
}  // namespace plain

}  // namespace strata::gpu
