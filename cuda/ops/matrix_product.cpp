#include "cuda/ops/matrix_product.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace strata::gpu {
namespace {

// cuBLASLt's documented alignment of the fastest algorithms; what is aligned better counts as this.
constexpr std::uint32_t best_alignment = 256;

std::string describe(const Product& p) {
  return std::string("matrix product ") + std::to_string(p.c.rows) + " x " + std::to_string(p.c.cols) +
         " x " + std::to_string(p.transpose_a ? p.a.rows : p.a.cols) + " of " + name_of(p.a.dtype) +
         " into " + name_of(p.c.dtype);
}

void check(cublasStatus_t status, const char* call, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw InternalError(std::string(call) + " failed with status " + std::to_string(static_cast<int>(status)) +
                      " in " + what + " -> a fault of the program; report it");
}

cudaDataType_t data_type(DType type) {
  return type == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

std::uint32_t alignment(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  return static_cast<std::uint32_t>(std::min<std::uintptr_t>(address & (~address + 1), best_alignment));
}

// cuBLASLt's descriptors, freed with their owner.
template <class T, cublasStatus_t (*Destroy)(T)>
struct Deleter {
  using pointer = T;
  void operator()(T object) const { Destroy(object); }
};
using Operation = std::unique_ptr<void, Deleter<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<void, Deleter<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<void, Deleter<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

Operation operation(bool transpose_first, bool transpose_second, const std::string& what) {
  cublasLtMatmulDesc_t raw = nullptr;
  check(cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate", what);
  Operation result(raw);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, bool transpose) {
    const std::int32_t value = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(raw, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute", what);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, transpose_first);
  set(CUBLASLT_MATMUL_DESC_TRANSB, transpose_second);
  return result;
}

// The row-major matrix as cuBLASLt sees it: column-major, rows and columns swapped.
Layout layout(const ConstMatrix& x, const std::string& what) {
  cublasLtMatrixLayout_t raw = nullptr;
  // a single row may have any stride; cuBLASLt wants one of at least the length of the row
  check(cublasLtMatrixLayoutCreate(&raw, data_type(x.dtype), static_cast<std::uint64_t>(x.cols),
                                   static_cast<std::uint64_t>(x.rows), std::max(x.stride, x.cols)),
        "cublasLtMatrixLayoutCreate", what);
  return Layout(raw);
}

}  // namespace

struct MatrixProducts::Key {
  std::array<std::int64_t, 6> extents;  // rows and columns of c, depth, strides
  std::array<std::uint32_t, 3> alignments;
  std::array<DType, 2> dtypes;  // of a and b, and of c
  bool transpose_a, transpose_b;
  auto operator<=>(const Key&) const = default;
};

// Row-major C = op(A) op(B) is column-major C^T = op(B)^T op(A)^T, and a row-major matrix read as
// column-major is its transpose: so b comes first, a second, each transposed as stored.
struct MatrixProducts::Plan {
  Operation operation;
  Layout first, second, result;
  cublasLtMatmulAlgo_t algorithm;
};

MatrixProducts::MatrixProducts(std::size_t workspace_bytes) : workspace_bytes_(workspace_bytes) {
  check(cublasLtCreate(&handle_), "cublasLtCreate", "the start of the CUDA backend");
}

MatrixProducts::~MatrixProducts() {
  cublasLtDestroy(handle_);
}

const MatrixProducts::Plan& MatrixProducts::plan(const Product& p) {
  const std::int64_t depth = p.transpose_a ? p.a.rows : p.a.cols;
  const Key key{{p.c.rows, p.c.cols, depth, p.c.stride, p.a.stride, p.b.stride},
                {alignment(p.c.data), alignment(p.a.data), alignment(p.b.data)},
                {p.a.dtype, p.c.dtype},
                p.transpose_a,
                p.transpose_b};
  std::unique_ptr<Plan>& place = plans_[key];
  if (place) return *place;

  const std::string what = describe(p);
  auto made = std::make_unique<Plan>();
  made->operation = operation(p.transpose_b, p.transpose_a, what);
  made->first = layout(p.b, what);
  made->second = layout(p.a, what);
  made->result = layout(p.c, what);

  cublasLtMatmulPreference_t raw = nullptr;
  check(cublasLtMatmulPreferenceCreate(&raw), "cublasLtMatmulPreferenceCreate", what);
  const Preference preference(raw);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(raw, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute", what);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes_});
  // No split-K that adds parts in the output: their order is not fixed, or they are rounded to bf16 on the
  // way.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.c.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.c.data));

  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  check(cublasLtMatmulAlgoGetHeuristic(handle_, made->operation.get(), made->first.get(), made->second.get(),
                                       made->result.get(), made->result.get(), raw, 1, &found, &count),
        "cublasLtMatmulAlgoGetHeuristic", what);
  if (count == 0)
    throw InternalError(what + ": cuBLASLt has no algorithm for it -> a fault of the caller; report it");
  made->algorithm = found.algo;
  place = std::move(made);
  return *place;
}

void MatrixProducts::run(cudaStream_t stream, const Product& p, void* workspace) {
  const Plan& plan = this->plan(p);
  const float alpha = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
  const cublasStatus_t status =
      cublasLtMatmul(handle_, plan.operation.get(), &alpha, p.b.data, plan.first.get(), p.a.data,
                     plan.second.get(), &beta, p.c.data, plan.result.get(), p.c.data, plan.result.get(),
                     &plan.algorithm, workspace, workspace_bytes_, stream);
  if (status != CUBLAS_STATUS_SUCCESS) check(status, "cublasLtMatmul", describe(p));
}

std::size_t product_workspace_bytes(int compute_capability_major) {
  return (compute_capability_major >= 9 ? std::size_t{64} : std::size_t{32}) << 20;
}

}  // namespace strata::gpu
