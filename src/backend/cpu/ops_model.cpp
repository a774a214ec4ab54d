// CpuOps: linear layers, embedding, norm, rotary embedding, attention, SwiGLU and loss.
#include <algorithm>

#include "backend/cpu/ops_impl.h"

namespace strata::cpu {
namespace {

std::int64_t norm_partials(std::int64_t rows) {
  return std::clamp<std::int64_t>((rows + 31) / 32, 1, kMaxPartials);
}

[[noreturn]] void bad_token(const char* operation, std::int64_t row, std::int32_t id,
                            std::int64_t vocabulary) {
  throw InternalError(std::string(operation) + ": token " + std::to_string(id) + " in row " +
                      std::to_string(row) + " is outside the vocabulary of " + std::to_string(vocabulary) +
                      " -> check the data against the model");
}

}  // namespace

std::size_t norm_scratch_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(norm_partials(rows) * columns) * sizeof(float);
}

std::size_t embedding_scratch_bytes(std::int64_t tokens, std::int64_t columns, int threads) {
  // token and position of every row, its position alone, starts of the runs; a row of sums for each thread
  const auto n = static_cast<std::size_t>(tokens);
  return 3 * (n + 8) * sizeof(std::int64_t) + static_cast<std::size_t>(threads * columns) * sizeof(float);
}

void CpuOps::product(Stream& stream, const GemmCall& call) {
  const ScratchBuffer scratch = scratch_.at_least(stream, gemm_.scratch_bytes(call));
  cpu_stream(stream).run([this, call, scratch] { gemm_.run(call, scratch->data()); });
}

void CpuOps::linear_forward(Stream& stream, Matrix y, ConstMatrix x, ConstMatrix w) {
  checks::linear_forward(y, x, w);
  product(stream, {.c = y, .a = x, .b = w, .transpose_b = true});
}

void CpuOps::linear_backward_input(Stream& stream, Matrix dx, ConstMatrix dy, ConstMatrix w,
                                   bool accumulate) {
  checks::linear_backward_input(dx, dy, w);
  product(stream, {.c = dx, .a = dy, .b = w, .accumulate = accumulate});
}

void CpuOps::linear_backward_weight(Stream& stream, Matrix dw, ConstMatrix dy, ConstMatrix x,
                                    bool accumulate) {
  checks::linear_backward_weight(dw, dy, x);
  product(stream, {.c = dw, .a = dy, .b = x, .transpose_a = true, .accumulate = accumulate});
}

void CpuOps::embedding_forward(Stream& stream, Matrix out, ConstMatrix table, const std::int32_t* tokens) {
  checks::embedding_forward(out, table, tokens);
  enqueue_ranges(stream, out.rows, kRowGrain, [out, table, tokens](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int32_t id = tokens[r];
      if (id < 0 || id >= table.rows) bad_token("embedding_forward", r, id, table.rows);
      std::memcpy(out.at(r, 0), table.at(id, 0), static_cast<std::size_t>(out.cols) * size_of(out.dtype));
    }
  });
}

// Rows of one token are added in fp32, in token order, and rounded once; rows of different tokens are
// independent. Sorting (token, position) pairs finds them without a table of the vocabulary's size.
void CpuOps::embedding_backward(Stream& stream, Matrix dtable, ConstMatrix dout, const std::int32_t* tokens,
                                bool accumulate) {
  checks::embedding_backward(dtable, dout, tokens);
  const ScratchBuffer scratch =
      scratch_.at_least(stream, embedding_scratch_bytes(dout.rows, dout.cols, workers_.threads()));
  cpu_stream(stream).run([=, this] {
    const std::int64_t count = dout.rows;
    if (!accumulate) {
      run_ranges(dtable.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          std::memset(dtable.at(r, 0), 0, static_cast<std::size_t>(dtable.cols) * size_of(dtable.dtype));
        }
      });
    }
    auto* pairs = scratch->as<std::int64_t>();
    auto* positions = pairs + count + 8;
    auto* starts = positions + count + 8;
    auto* sums = reinterpret_cast<float*>(starts + count + 8);
    for (std::int64_t r = 0; r < count; ++r) {
      if (tokens[r] < 0 || tokens[r] >= dtable.rows)
        bad_token("embedding_backward", r, tokens[r], dtable.rows);
      pairs[r] = (static_cast<std::int64_t>(tokens[r]) << 32) | r;
    }
    std::sort(pairs, pairs + count);
    std::int64_t runs = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      positions[i] = pairs[i] & 0xffffffff;
      if (i == 0 || pairs[i] >> 32 != pairs[i - 1] >> 32) starts[runs++] = i;
    }
    starts[runs] = count;
    workers_.run(runs, [&](std::int64_t run, int worker) {
      const std::int64_t first = starts[run];
      kernels::gather_sum(dtable.at(pairs[first] >> 32, 0), dtable.dtype, dout, positions + first,
                          starts[run + 1] - first, accumulate, sums + worker * dout.cols);
    });
  });
}

void CpuOps::rmsnorm_forward(Stream& stream, Matrix y, float* rstd, Matrix sum, ConstMatrix x,
                             ConstMatrix residual, ConstFlat weight, float eps) {
  checks::rmsnorm_forward(y, rstd, sum, x, residual, weight);
  enqueue_ranges(stream, x.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::rmsnorm_forward(y, rstd, sum, x, residual, weight, eps, begin, end);
  });
}

void CpuOps::rmsnorm_backward(Stream& stream, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                              ConstMatrix h, ConstFlat weight, const float* rstd, bool accumulate_dweight) {
  checks::rmsnorm_backward(dx, dweight, dy, dresidual, h, weight, rstd);
  const ScratchBuffer scratch = scratch_.at_least(stream, norm_scratch_bytes(h.rows, h.cols));
  cpu_stream(stream).run([=, this] {
    auto* partial = scratch->as<float>();
    const std::int64_t parts = norm_partials(h.rows), rows = (h.rows + parts - 1) / parts;
    std::fill_n(partial, parts * h.cols, 0.0f);
    workers_.run(parts, [&](std::int64_t i, int) {
      kernels::rmsnorm_backward(dx, partial + i * h.cols, dy, dresidual, h, weight, rstd,
                                std::min(h.rows, i * rows), std::min(h.rows, (i + 1) * rows));
    });
    kernels::sum_rows(dweight, partial, parts, accumulate_dweight);
  });
}

void CpuOps::rope(Stream& stream, Matrix x, std::int64_t head_size, std::int64_t sequence,
                  const float* cosine, const float* sine, bool inverse) {
  checks::rope(x, head_size, sequence, cosine, sine);
  enqueue_ranges(stream, x.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::rope(x, head_size, sequence, cosine, sine, inverse, begin, end);
  });
}

void CpuOps::attention_forward(Stream& stream, const AttentionShape& shape, Matrix out, float* lse,
                               ConstMatrix q, ConstMatrix k, ConstMatrix v) {
  checks::attention_forward(shape, out, lse, q, k, v);
  const std::int64_t tasks = shape.batch * shape.key_value_heads;
  const std::size_t share = kernels::attention_forward_scratch_floats(shape, q.dtype);
  const auto shares = static_cast<std::size_t>(std::min<std::int64_t>(tasks, workers_.threads()));
  const ScratchBuffer scratch = scratch_.at_least(stream, shares * share * sizeof(float));
  cpu_stream(stream).run([=, this] {
    workers_.run(tasks, [&](std::int64_t i, int worker) {
      kernels::attention_forward(shape, out, lse, q, k, v, i / shape.key_value_heads,
                                 i % shape.key_value_heads,
                                 scratch->as<float>() + share * static_cast<std::size_t>(worker));
    });
  });
}

void CpuOps::attention_backward(Stream& stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
                                ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q,
                                ConstMatrix k, ConstMatrix v) {
  checks::attention_backward(shape, dq, dk, dv, dout, out, lse, q, k, v);
  const std::int64_t tasks = shape.batch * shape.key_value_heads;
  const std::size_t share = kernels::attention_backward_scratch_floats(shape, q.dtype);
  const auto shares = static_cast<std::size_t>(std::min<std::int64_t>(tasks, workers_.threads()));
  const ScratchBuffer scratch = scratch_.at_least(stream, shares * share * sizeof(float));
  cpu_stream(stream).run([=, this] {
    workers_.run(tasks, [&](std::int64_t i, int worker) {
      kernels::attention_backward(shape, dq, dk, dv, dout, out, lse, q, k, v, i / shape.key_value_heads,
                                  i % shape.key_value_heads,
                                  scratch->as<float>() + share * static_cast<std::size_t>(worker));
    });
  });
}

void CpuOps::swiglu_forward(Stream& stream, Matrix out, ConstMatrix gate_up) {
  checks::swiglu_forward(out, gate_up);
  enqueue_ranges(stream, out.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::swiglu_forward(out, gate_up, begin, end);
  });
}

void CpuOps::swiglu_backward(Stream& stream, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up) {
  checks::swiglu_backward(dgate_up, dout, gate_up);
  enqueue_ranges(stream, dout.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::swiglu_backward(dgate_up, dout, gate_up, begin, end);
  });
}

void CpuOps::cross_entropy(Stream& stream, Matrix logits, float* losses, const std::int32_t* targets,
                           bool write_gradient) {
  checks::cross_entropy(logits, losses, targets);
  enqueue_ranges(stream, logits.rows, 8, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      if (targets[r] >= logits.cols) bad_token("cross_entropy", r, targets[r], logits.cols);
    }
    kernels::cross_entropy(logits, losses, targets, write_gradient, begin, end);
  });
}

}  // namespace strata::cpu
