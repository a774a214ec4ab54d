#pragma once
// Matrix products of the CPU backend: c = op(a) op(b), or c += op(a) op(b), with fp32 accumulation and one
// rounding at the end. Four ways, chosen from the dtypes and from what the CPU can do:
//   sgemm   fp32: oneDNN's sgemm.
//   matmul  bf16 where the CPU has AMX: oneDNN matmul primitives, cached by shape.
//   dots    bf16 where the CPU has AVX-512 bf16 and no AMX: a blocked product of our own on its bf16 dot
//           products, a few percent faster than oneDNN there.
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

enum class GemmPath : std::uint8_t { automatic, sgemm, matmul, dots, packed };

struct GemmCall {
  Matrix c;       // (M, N) fp32 or bf16
  ConstMatrix a;  // (M, K), or (K, M) when transpose_a
  ConstMatrix b;  // (K, N), or (N, K) when transpose_b; dtype of a
  bool transpose_a = false, transpose_b = false, accumulate = false;

  std::int64_t m() const { return c.rows; }
  std::int64_t n() const { return c.cols; }
  std::int64_t k() const { return transpose_a ? a.rows : a.cols; }
};

// True when oneDNN has fast bf16 products on this CPU, and when it makes them with AMX.
bool cpu_has_bf16();
bool cpu_has_amx();

class Gemm {
 public:
  // A forced path that cannot do a call (sgemm with bf16, matmul or dots on a CPU without bf16 products)
  // throws InternalError at that call.
  Gemm(GemmPath path, Workers& workers);
  ~Gemm();

  // Bytes of 64-byte aligned scratch that run needs; data pointers of the call are not looked at.
  std::size_t scratch_bytes(const GemmCall& call);
  void run(const GemmCall& call, void* scratch);

 private:
  class Primitives;
  GemmPath path_for(const GemmCall& call) const;
  void run_dots(const GemmCall& call, void* scratch);

  GemmPath path_;
  Workers& workers_;
  std::unique_ptr<Primitives> primitives_;
};

}  // namespace strata::cpu
