// The part of cuBLASLt that cuda/ops uses, on the host, with the library's own declarations: products in
// column-major order, fp32 sums in order of k. Strict where the library may be lenient: what an algorithm was
// chosen for (extents, dtypes, alignment, workspace) must be what it is run with, or the product returns
// CUBLAS_STATUS_INVALID_VALUE. Runs at once, like the emulated runtime (runtime.h).
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <new>

#include "cuda/emulation/memory.h"

namespace {

struct Layout {
  cudaDataType_t type;
  std::uint64_t rows, cols;
  std::int64_t stride;
  bool operator==(const Layout&) const = default;
};

struct Operation {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  std::int32_t transpose_a, transpose_b;
  bool operator==(const Operation&) const = default;
};

struct Preference {
  std::uint64_t workspace_bytes = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t alignment_a = 256, alignment_b = 256, alignment_c = 256, alignment_d = 256;
};

// What the heuristic promises for: kept in the opaque algorithm.
struct Algorithm {
  std::uint64_t hash;
  std::uint32_t alignment_a, alignment_b, alignment_c;
  std::uint32_t workspace_bytes;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Operation) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));

// The library's descriptors are opaque storage for ours.
template <class Ours, class Theirs>
Ours& ours(Theirs* opaque) {
  return *std::launder(reinterpret_cast<Ours*>(opaque));
}
template <class Ours, class Theirs>
const Ours& ours(const Theirs* opaque) {
  return *std::launder(reinterpret_cast<const Ours*>(opaque));
}
template <class Theirs, class Ours>
cublasStatus_t make(Theirs** out, const Ours& value) {
  auto* const opaque = new Theirs{};
  new (opaque) Ours(value);
  *out = opaque;
  return CUBLAS_STATUS_SUCCESS;
}

std::uint64_t mixed(std::uint64_t h, std::uint64_t value) {
  h = (h ^ value) * 0x9e3779b97f4a7c15ull;
  return h ^ (h >> 29);
}

std::uint64_t hash(const Operation& o, const Layout& a, const Layout& b, const Layout& c) {
  std::uint64_t h = 1;
  for (const std::int64_t v : {std::int64_t{o.compute}, std::int64_t{o.scale}, std::int64_t{o.transpose_a},
                               std::int64_t{o.transpose_b}}) {
    h = mixed(h, static_cast<std::uint64_t>(v));
  }
  for (const Layout* l : {&a, &b, &c}) {
    h = mixed(mixed(h, l->rows), l->cols);
    h = mixed(mixed(h, static_cast<std::uint64_t>(l->stride)), static_cast<std::uint64_t>(l->type));
  }
  return h;
}

// Extents fit each other, and the dtypes are a combination of the library's table for fp32 compute.
bool supported(const Operation& o, const Layout& a, const Layout& b, const Layout& c) {
  const auto outer_a = o.transpose_a == CUBLAS_OP_T ? a.cols : a.rows,
             depth_a = o.transpose_a == CUBLAS_OP_T ? a.rows : a.cols;
  const auto outer_b = o.transpose_b == CUBLAS_OP_T ? b.rows : b.cols,
             depth_b = o.transpose_b == CUBLAS_OP_T ? b.cols : b.rows;
  const bool extents = outer_a == c.rows && outer_b == c.cols && depth_a == depth_b && depth_a > 0;
  const bool types =
      a.type == b.type && ((a.type == CUDA_R_16BF && (c.type == CUDA_R_16BF || c.type == CUDA_R_32F)) ||
                           (a.type == CUDA_R_32F && c.type == CUDA_R_32F));
  return extents && types && o.compute == CUBLAS_COMPUTE_32F && o.scale == CUDA_R_32F;
}

std::size_t element_bytes(cudaDataType_t type) {
  return type == CUDA_R_16BF ? 2 : 4;
}
std::uint32_t alignment(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  return static_cast<std::uint32_t>(address & (~address + 1) & 0x1ff);  // 0 where 512 or more
}
bool aligned_to(const void* p, std::uint32_t bytes) {
  const std::uint32_t found = alignment(p);
  return found == 0 || found >= bytes;
}
bool on_device(const void* p, const Layout& l) {
  const std::size_t elements = static_cast<std::size_t>(l.stride) * (l.cols - 1) + l.rows;
  return strata::emulation::DeviceMemory::instance().holds(p, elements * element_bytes(l.type));
}

float load(const void* p, const Layout& l, std::uint64_t row, std::uint64_t col) {
  const std::size_t at = static_cast<std::size_t>(l.stride) * col + row;
  if (l.type == CUDA_R_32F) return static_cast<const float*>(p)[at];
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[at]);
}
void store(void* p, const Layout& l, std::uint64_t row, std::uint64_t col, float value) {
  const std::size_t at = static_cast<std::size_t>(l.stride) * col + row;
  if (l.type == CUDA_R_32F) {
    static_cast<float*>(p)[at] = value;
  } else {
    static_cast<__nv_bfloat16*>(p)[at] = __float2bfloat16_rn(value);
  }
}

template <class T>
cublasStatus_t set(T& field, const void* value, std::size_t bytes) {
  if (bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(const cublasLtHandle_t handle) {
  delete reinterpret_cast<char*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  return make(out, Operation{compute, scale, CUBLAS_OP_N, CUBLAS_OP_N});
}
cublasStatus_t cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t operation) {
  delete operation;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  auto& o = ours<Operation>(operation);
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) return set(o.transpose_a, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) return set(o.transpose_b, value, bytes);
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t stride) {
  if (stride < static_cast<std::int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  return make(out, Layout{type, rows, cols, stride});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  return make(out, Preference{});
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  auto& p = ours<Preference>(preference);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return set(p.workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return set(p.reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return set(p.alignment_a, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return set(p.alignment_b, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return set(p.alignment_c, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return set(p.alignment_d, value, bytes);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t* results, int* count) {
  *count = 0;
  const auto& p = ours<Preference>(preference);
  const auto& o = ours<Operation>(operation);
  const auto &la = ours<Layout>(a), &lb = ours<Layout>(b), &lc = ours<Layout>(c);
  if (requested < 1 || !(lc == ours<Layout>(d)) || !supported(o, la, lb, lc))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  // Without fixed-order reductions the real library may return algorithms whose results vary.
  if (p.reductions != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) return CUBLAS_STATUS_NOT_SUPPORTED;
  results[0] = {};
  ours<Algorithm>(&results[0].algo) = {hash(o, la, lb, lc), p.alignment_a, p.alignment_b,
                                       p.alignment_c < p.alignment_d ? p.alignment_c : p.alignment_d,
                                       static_cast<std::uint32_t>(p.workspace_bytes)};
  results[0].workspaceSize = p.workspace_bytes;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t) {
  const auto& o = ours<Operation>(operation);
  const auto &la = ours<Layout>(a_layout), &lb = ours<Layout>(b_layout), &lc = ours<Layout>(c_layout);
  const auto& chosen = ours<Algorithm>(algorithm);
  const bool fits = lc == ours<Layout>(d_layout) && c == d && chosen.hash == hash(o, la, lb, lc) &&
                    aligned_to(a, chosen.alignment_a) && aligned_to(b, chosen.alignment_b) &&
                    aligned_to(d, chosen.alignment_c) && workspace_bytes >= chosen.workspace_bytes;
  if (!fits || !on_device(a, la) || !on_device(b, lb) || !on_device(d, lc) || !aligned_to(workspace, 256) ||
      !strata::emulation::DeviceMemory::instance().holds(workspace, workspace_bytes)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  const bool transpose_a = o.transpose_a == CUBLAS_OP_T, transpose_b = o.transpose_b == CUBLAS_OP_T;
  const std::uint64_t depth = transpose_a ? la.rows : la.cols;
  for (std::uint64_t col = 0; col < lc.cols; ++col) {
    for (std::uint64_t row = 0; row < lc.rows; ++row) {
      float sum = 0;
      for (std::uint64_t k = 0; k < depth; ++k) {
        sum += (transpose_a ? load(a, la, k, row) : load(a, la, row, k)) *
               (transpose_b ? load(b, lb, col, k) : load(b, lb, k, col));
      }
      // beta 0 does not read c, which may hold NaN
      store(d, lc, row, col, keep == 0.0f ? scale * sum : scale * sum + keep * load(c, lc, row, col));
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
