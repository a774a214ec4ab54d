#pragma once
// Matrix products of the CPU backend: c = op(a) op(b), or c += op(a) op(b), with fp32 accumulation and one
// rounding at the end. Three ways, chosen from the dtypes and from what the CPU can do:
//   sgemm   fp32: oneDNN's sgemm.
//   matmul  bf16 where the CPU has AVX-512 bf16 or AMX: oneDNN matmul primitives, cached by shape.
//   packed  bf16 elsewhere (oneDNN's own way there is hundreds of times slower), and mixed dtypes: a blocked
//           product of our own that widens to fp32 while it packs. Its results are the same bits on every
//           machine with fused multiply-add.
// Work is cut into blocks by the shape alone, so the number of threads never changes a result.
#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/cpu/ops_workers.h"
#include "backend/tensor.h"

namespace strata::cpu {

enum class GemmPath : std::uint8_t { automatic, sgemm, matmul, packed };

struct GemmCall {
  Matrix c;       // (M, N) fp32 or bf16
  ConstMatrix a;  // (M, K), or (K, M) when transpose_a
  ConstMatrix b;  // (K, N), or (N, K) when transpose_b; dtype of a
  bool transpose_a = false, transpose_b = false, accumulate = false;

  std::int64_t m() const { return c.rows; }
  std::int64_t n() const { return c.cols; }
  std::int64_t k() const { return transpose_a ? a.rows : a.cols; }
};

// True when oneDNN has fast bf16 products on this CPU.
bool cpu_has_bf16();

class Gemm {
 public:
  // A forced path that cannot do a call (sgemm with bf16, matmul with bf16 on a CPU without it) throws
  // InternalError at that call.
  Gemm(GemmPath path, Workers& workers);
  ~Gemm();

  // Bytes of 64-byte aligned scratch that run needs; data pointers of the call are not looked at.
  std::size_t scratch_bytes(const GemmCall& call);
  void run(const GemmCall& call, void* scratch);

 private:
  class Primitives;
  GemmPath path_for(const GemmCall& call) const;

  GemmPath path_;
  Workers& workers_;
  std::unique_ptr<Primitives> primitives_;
};

}  // namespace strata::cpu
