#pragma once
// Matrix products by cuBLASLt: c (+)= op(a) op(b), row-major, fp32 accumulation, the same bits at every run
// on one kind of GPU.
//
// Dtypes: a and b both bf16 with c bf16 or fp32, or all fp32 (computed in fp32, not TF32). cuBLASLt's
// heuristic chooses an algorithm once for each shape, dtype, layout and alignment; split-K only with the
// reduction that adds parts in a fixed order from the workspace. Calls come from one host thread at a time.
#include <cublasLt.h>

#include <cstddef>
#include <map>
#include <memory>

#include "backend/tensor.h"

namespace strata::gpu {

struct Product {
  Matrix c;
  ConstMatrix a, b;  // as stored: a is (m, k), or (k, m) with transpose_a; b likewise
  bool transpose_a = false, transpose_b = false, accumulate = false;
};

class MatrixProducts {
 public:
  // Throws InternalError when cuBLASLt cannot start.
  explicit MatrixProducts(std::size_t workspace_bytes);
  ~MatrixProducts();
  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  // Bytes of device memory that every call needs, 256-byte aligned; calls on one stream may share it.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  // Throws InternalError naming the product when cuBLASLt has no algorithm for it or refuses it.
  void run(cudaStream_t stream, const Product& product, void* workspace);

 private:
  struct Key;
  struct Plan;
  const Plan& plan(const Product& product);

  cublasLtHandle_t handle_ = nullptr;
  std::size_t workspace_bytes_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

// NVIDIA's recommendation for cuBLAS: 64 MiB from Hopper (compute capability 9) on, 32 MiB before.
std::size_t product_workspace_bytes(int compute_capability_major);

}  // namespace strata::gpu
