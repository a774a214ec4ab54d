#include "backend/cpu/ops.h"

#include <algorithm>

#include "backend/cpu/ops_impl.h"

namespace strata {
namespace cpu {
namespace {

GemmCall shaped(DType c, DType operands, std::int64_t m, std::int64_t n, std::int64_t k, bool transpose_a,
                bool transpose_b) {
  GemmCall call;
  call.c = {nullptr, c, m, n, n};
  call.a = transpose_a ? ConstMatrix{nullptr, operands, k, m, m} : ConstMatrix{nullptr, operands, m, k, k};
  call.b = transpose_b ? ConstMatrix{nullptr, operands, n, k, k} : ConstMatrix{nullptr, operands, k, n, n};
  call.transpose_a = transpose_a;
  call.transpose_b = transpose_b;
  return call;
}

}  // namespace

// One buffer serves all operations of a stream in turn, so what counts is the greediest.
std::size_t CpuOps::workspace_bytes(const Workload& w) const {
  std::size_t most = 0;
  auto linear = [&](std::int64_t tokens, std::int64_t in, std::int64_t out) {
    if (tokens <= 0 || in <= 0 || out <= 0) return;
    most = std::max(most, gemm_.scratch_bytes(shaped(w.compute, w.compute, tokens, out, in, false, true)));
    most = std::max(most, gemm_.scratch_bytes(shaped(w.compute, w.compute, tokens, in, out, false, false)));
    most = std::max(most, gemm_.scratch_bytes(shaped(w.gradient, w.compute, out, in, tokens, true, false)));
  };
  const AttentionShape& a = w.attention;
  const std::int64_t q = a.query_heads * a.head_size, kv = a.key_value_heads * a.head_size;
  linear(w.tokens, w.hidden, q);
  linear(w.tokens, w.hidden, kv);
  linear(w.tokens, w.hidden, q + 2 * kv);
  linear(w.tokens, q, w.hidden);
  linear(w.tokens, w.hidden, w.intermediate);
  linear(w.tokens, w.hidden, 2 * w.intermediate);
  linear(w.tokens, w.intermediate, w.hidden);
  linear(w.loss_chunk_tokens > 0 ? std::min(w.loss_chunk_tokens, w.tokens) : w.tokens, w.hidden,
         w.vocabulary);
  if (a.key_value_heads > 0 && a.query_heads > 0 && a.head_size > 0) {
    const auto pairs = static_cast<std::size_t>(a.batch * a.key_value_heads);
    const auto tasks = std::min<std::size_t>(pairs, static_cast<std::size_t>(workers_.threads()));
    most = std::max(most, tasks * sizeof(float) *
                              std::max(kernels::attention_forward_scratch_floats(a, w.compute),
                                       kernels::attention_backward_scratch_floats(a, w.compute)));
  }
  most = std::max(most, norm_scratch_bytes(w.tokens, w.hidden));
  return std::max(most, embedding_scratch_bytes(w.tokens, w.hidden, workers_.threads()));
}

}  // namespace cpu

std::unique_ptr<Ops> make_cpu_ops(CpuDevice& device, const CpuOpsOptions& options) {
  if (options.threads < 1) {
    throw UsageError("threads is " + std::to_string(options.threads) +
                     ", allowed is 1 or more -> set it to 1");
  }
  return std::make_unique<cpu::CpuOps>(device, options);
}

}  // namespace strata
