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
  const Check check("linear_forward");
  check.matrix("x", x, x.rows, x.cols);
  check.matrix("w", w, w.rows, x.cols);
  check.matrix("y", y, x.rows, w.rows);
  check.dtype("w", w.dtype, x.dtype);
  check.dtype("y", y.dtype, x.dtype);
  product(stream, {.c = y, .a = x, .b = w, .transpose_b = true});
}

void CpuOps::linear_backward_input(Stream& stream, Matrix dx, ConstMatrix dy, ConstMatrix w,
                                   bool accumulate) {
  const Check check("linear_backward_input");
  check.matrix("dy", dy, dy.rows, dy.cols);
  check.matrix("w", w, dy.cols, w.cols);
  check.matrix("dx", dx, dy.rows, w.cols);
  check.dtype("w", w.dtype, dy.dtype);
  check.dtype("dx", dx.dtype, dy.dtype);
  product(stream, {.c = dx, .a = dy, .b = w, .accumulate = accumulate});
}

void CpuOps::linear_backward_weight(Stream& stream, Matrix dw, ConstMatrix dy, ConstMatrix x,
                                    bool accumulate) {
  const Check check("linear_backward_weight");
  check.matrix("dy", dy, dy.rows, dy.cols);
  check.matrix("x", x, dy.rows, x.cols);
  check.matrix("dw", dw, dy.cols, x.cols);
  check.dtype("x", x.dtype, dy.dtype);
  product(stream, {.c = dw, .a = dy, .b = x, .transpose_a = true, .accumulate = accumulate});
}

void CpuOps::embedding_forward(Stream& stream, Matrix out, ConstMatrix table, const std::int32_t* tokens) {
  const Check check("embedding_forward");
  check.matrix("table", table, table.rows, table.cols);
  check.matrix("out", out, out.rows, table.cols);
  check.dtype("out", out.dtype, table.dtype);
  check.present("tokens", tokens);
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
  const Check check("embedding_backward");
  check.matrix("dout", dout, dout.rows, dout.cols);
  check.matrix("dtable", dtable, dtable.rows, dout.cols);
  check.present("tokens", tokens);
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
  const Check check("rmsnorm_forward");
  check.matrix("x", x, x.rows, x.cols);
  check.matrix("y", y, x.rows, x.cols);
  check.dtype("y", y.dtype, x.dtype);
  check.flat("weight", weight, x.cols);
  check.dtype("weight", weight.dtype, x.dtype);
  check.present("rstd", rstd);
  if (sum) check.matrix("sum", sum, x.rows, x.cols), check.dtype("sum", sum.dtype, x.dtype);
  if (residual) {
    check.matrix("residual", residual, x.rows, x.cols);
    check.dtype("residual", residual.dtype, x.dtype);
  }
  enqueue_ranges(stream, x.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::rmsnorm_forward(y, rstd, sum, x, residual, weight, eps, begin, end);
  });
}

void CpuOps::rmsnorm_backward(Stream& stream, Matrix dx, Flat dweight, ConstMatrix dy, ConstMatrix dresidual,
                              ConstMatrix h, ConstFlat weight, const float* rstd, bool accumulate_dweight) {
  const Check check("rmsnorm_backward");
  check.matrix("h", h, h.rows, h.cols);
  check.matrix("dy", dy, h.rows, h.cols);
  check.matrix("dx", dx, h.rows, h.cols);
  check.dtype("dy", dy.dtype, h.dtype);
  check.dtype("dx", dx.dtype, h.dtype);
  check.flat("weight", weight, h.cols);
  check.dtype("weight", weight.dtype, h.dtype);
  check.flat("dweight", dweight, h.cols);
  check.present("rstd", rstd);
  if (dresidual) {
    check.matrix("dresidual", dresidual, h.rows, h.cols);
    check.dtype("dresidual", dresidual.dtype, h.dtype);
  }
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
  const Check check("rope");
  check.matrix("x", x, x.rows, x.cols);
  check.that(head_size > 0 && head_size % 2 == 0 && x.cols % head_size == 0,
             "the head size is odd or does not divide the columns of x");
  check.that(sequence > 0, "the sequence is empty");
  check.present("cosine", cosine);
  check.present("sine", sine);
  enqueue_ranges(stream, x.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::rope(x, head_size, sequence, cosine, sine, inverse, begin, end);
  });
}

static void check_attention(const Check& check, const AttentionShape& s, const ConstMatrix& q,
                            const ConstMatrix& k, const ConstMatrix& v) {
  check.that(s.batch > 0 && s.sequence > 0 && s.query_heads > 0 && s.key_value_heads > 0,
             "the shape is empty");
  check.that(s.query_heads % s.key_value_heads == 0, "query heads are not a multiple of key/value heads");
  check.that(s.head_size >= 2 && s.head_size <= 256 && s.head_size % 2 == 0,
             "the head size is not even in [2, 256]");
  const std::int64_t n = s.batch * s.sequence;
  check.matrix("q", q, n, s.query_heads * s.head_size);
  check.matrix("k", k, n, s.key_value_heads * s.head_size);
  check.matrix("v", v, n, s.key_value_heads * s.head_size);
  check.dtype("k", k.dtype, q.dtype);
  check.dtype("v", v.dtype, q.dtype);
}

void CpuOps::attention_forward(Stream& stream, const AttentionShape& shape, Matrix out, float* lse,
                               ConstMatrix q, ConstMatrix k, ConstMatrix v) {
  const Check check("attention_forward");
  check_attention(check, shape, q, k, v);
  check.matrix("out", out, q.rows, q.cols);
  check.dtype("out", out.dtype, q.dtype);
  check.present("lse", lse);
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
  const Check check("attention_backward");
  check_attention(check, shape, q, k, v);
  check.matrix("out", out, q.rows, q.cols);
  check.matrix("dout", dout, q.rows, q.cols);
  check.matrix("dq", dq, q.rows, q.cols);
  check.matrix("dk", dk, k.rows, k.cols);
  check.matrix("dv", dv, v.rows, v.cols);
  for (const DType type : {out.dtype, dout.dtype, dq.dtype, dk.dtype, dv.dtype}) {
    check.dtype("a gradient or the output", type, q.dtype);
  }
  check.present("lse", lse);
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
  const Check check("swiglu_forward");
  check.matrix("out", out, out.rows, out.cols);
  check.matrix("gate_up", gate_up, out.rows, 2 * out.cols);
  check.dtype("gate_up", gate_up.dtype, out.dtype);
  enqueue_ranges(stream, out.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::swiglu_forward(out, gate_up, begin, end);
  });
}

void CpuOps::swiglu_backward(Stream& stream, Matrix dgate_up, ConstMatrix dout, ConstMatrix gate_up) {
  const Check check("swiglu_backward");
  check.matrix("dout", dout, dout.rows, dout.cols);
  check.matrix("gate_up", gate_up, dout.rows, 2 * dout.cols);
  check.matrix("dgate_up", dgate_up, dout.rows, 2 * dout.cols);
  check.dtype("gate_up", gate_up.dtype, dout.dtype);
  check.dtype("dgate_up", dgate_up.dtype, dout.dtype);
  enqueue_ranges(stream, dout.rows, kRowGrain, [=](std::int64_t begin, std::int64_t end) {
    kernels::swiglu_backward(dgate_up, dout, gate_up, begin, end);
  });
}

void CpuOps::cross_entropy(Stream& stream, Matrix logits, float* losses, const std::int32_t* targets,
                           bool write_gradient) {
  const Check check("cross_entropy");
  check.matrix("logits", logits, logits.rows, logits.cols);
  check.that(logits.cols > 0, "the vocabulary is empty");
  check.present("losses", losses);
  check.present("targets", targets);
  enqueue_ranges(stream, logits.rows, 8, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      if (targets[r] >= logits.cols) bad_token("cross_entropy", r, targets[r], logits.cols);
    }
    kernels::cross_entropy(logits, losses, targets, write_gradient, begin, end);
  });
}

}  // namespace strata::cpu
