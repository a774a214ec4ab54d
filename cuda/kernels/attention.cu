// Host side of attention: checks, and the choice between the flash and the plain kernels.
#include "cuda/kernels/attention.h"

#include "cuda/kernels/attention_launch.h"
#include "cuda/kernels/attention_tiles.cuh"

namespace strata::gpu {

namespace {

AttentionCheck checked_inputs(const char* operation, const AttentionShape& s, const ConstMatrix& q,
                              const ConstMatrix& k, const ConstMatrix& v) {
  const AttentionCheck check(operation, s, q.dtype);
  const std::int64_t tokens = s.batch * s.sequence;
  check.matrix("q", q, tokens, s.query_heads * s.head_size);
  check.matrix("k", k, tokens, s.key_value_heads * s.head_size);
  check.matrix("v", v, tokens, s.key_value_heads * s.head_size);
  return check;
}

bool rows_are_aligned(const ConstMatrix& x) {
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && (x.rows == 1 || x.stride % 8 == 0);
}

}  // namespace

bool attention_is_flash(const AttentionShape& shape, std::initializer_list<ConstMatrix> matrices) {
  for (const ConstMatrix& x : matrices) {
    if (x.dtype != DType::bf16 || !rows_are_aligned(x)) return false;
  }
  return flash::with_head_size(shape.head_size, [](auto) {});
}

void attention_forward(cudaStream_t stream, const AttentionShape& shape, Matrix out, float* lse,
                       ConstMatrix q, ConstMatrix k, ConstMatrix v) {
  const AttentionCheck check = checked_inputs("attention_forward", shape, q, k, v);
  check.matrix("out", out, q.rows, q.cols);
  check.that(lse != nullptr, "lse is missing");
  const auto run = attention_is_flash(shape, {out, q, k, v}) ? flash::forward : plain::forward;
  run(stream, shape, out, lse, q, k, v);
}

std::size_t attention_backward_scratch_bytes(const AttentionShape& s) {
  return static_cast<std::size_t>(s.batch * s.query_heads * s.sequence) * sizeof(float);
}

void attention_backward(cudaStream_t stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
                        ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
                        ConstMatrix v, void* scratch) {
  const AttentionCheck check = checked_inputs("attention_backward", shape, q, k, v);
  check.matrix("out", out, q.rows, q.cols);
  check.matrix("dout", dout, q.rows, q.cols);
  check.matrix("dq", dq, q.rows, q.cols);
  check.matrix("dk", dk, k.rows, k.cols);
  check.matrix("dv", dv, v.rows, v.cols);
  check.that(lse != nullptr, "lse is missing");
  check.that(scratch != nullptr, "the scratch is missing");
  const bool is_flash = attention_is_flash(shape, {dq, dk, dv, dout, out, q, k, v});
  const auto run = is_flash ? flash::backward : plain::backward;
  run(stream, shape, dq, dk, dv, dout, out, lse, q, k, v, static_cast<float*>(scratch));
}

}  // namespace strata::gpu
