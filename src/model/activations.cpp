#include "model/activations.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "model/parameter_table.h"

namespace strata {
namespace {

constexpr std::size_t kAlignment = 256;       // what GPU libraries like best; harmless elsewhere
constexpr std::int64_t kChunkMultiple = 128;  // keeps the chunk's GEMMs whole tiles

// Hands out pieces of an arena one after the other. Without an arena it only counts: the plan and the
// placement are the same walk.
class Carver {
 public:
  explicit Carver(void* arena) : arena_(static_cast<std::byte*>(arena)) {}

  Matrix matrix(const char* name, DType dtype, std::int64_t rows, std::int64_t cols) {
    return strata::matrix(take(name, size_of(dtype) * static_cast<std::size_t>(rows * cols)), dtype, rows,
                          cols);
  }
  float* floats(const char* name, std::int64_t count) {
    return static_cast<float*>(take(name, sizeof(float) * static_cast<std::size_t>(count)));
  }

  // Groups that are never alive together: each starts where the first one did, the largest counts.
  void begin_shared(const char* name) { shared_name_ = name, shared_begin_ = shared_end_ = used_; }
  void next_group() { shared_end_ = std::max(shared_end_, used_), used_ = shared_begin_; }
  void end_shared() {
    next_group();
    used_ = shared_end_;
    account(std::exchange(shared_name_, nullptr), shared_end_ - shared_begin_);
  }

  ActivationPlan plan() && {
    plan_.bytes = used_;
    return std::move(plan_);
  }

 private:
  void* take(const char* name, std::size_t bytes) {
    const std::size_t begin = used_, padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    used_ += padded;
    if (shared_name_ == nullptr) account(name, padded);
    return arena_ == nullptr ? nullptr : arena_ + begin;
  }
  void account(const char* name, std::size_t bytes) {
    auto found =
        std::find_if(plan_.entries.begin(), plan_.entries.end(), [=](auto& e) { return e.name == name; });
    if (found == plan_.entries.end()) found = plan_.entries.insert(found, {name, 0});
    found->bytes += bytes;
  }

  std::byte* arena_;
  std::size_t used_ = 0, shared_begin_ = 0, shared_end_ = 0;
  const char* shared_name_ = nullptr;
  ActivationPlan plan_;
};

struct Sizes {
  explicit Sizes(const LlamaSetup& s)
      : tokens(s.tokens()),
        hidden(s.config.hidden_size),
        intermediate(s.config.intermediate_size),
        queries(s.config.num_attention_heads * s.config.head_dim),
        keys(s.config.num_key_value_heads * s.config.head_dim) {}
  std::int64_t tokens, hidden, intermediate, queries, keys;  // N, C, F, Q, K
};

// Everything of a layer that backward reads, save what `selective` computes again.
LayerActivations carve_layer(Carver& c, const LlamaSetup& s) {
  const Sizes z(s);
  LayerActivations a;
  a.attention_rstd = c.floats("norm statistics", z.tokens);
  a.feed_forward_rstd = c.floats("norm statistics", z.tokens);
  a.qkv = c.matrix("queries, keys, values", s.compute, z.tokens, z.queries + 2 * z.keys);
  a.query_key = a.qkv.block(0, 0, z.tokens, z.queries + z.keys);
  a.query = a.qkv.block(0, 0, z.tokens, z.queries);
  a.key = a.qkv.block(0, z.queries, z.tokens, z.keys);
  a.value = a.qkv.block(0, z.queries + z.keys, z.tokens, z.keys);
  a.attended = c.matrix("attention outputs", s.compute, z.tokens, z.queries);
  a.lse = c.floats("attention statistics", z.tokens * s.config.num_attention_heads);
  a.middle = c.matrix("residual stream", s.compute, z.tokens, z.hidden);
  a.gate_up = c.matrix("gates and ups", s.compute, z.tokens, 2 * z.intermediate);
  return a;
}

void carve_norm_outputs(Carver& c, const LlamaSetup& s, LayerActivations& a) {
  a.attention_in = c.matrix("norm outputs", s.compute, s.tokens(), s.config.hidden_size);
  // selective computes each just before it is read: one buffer serves both.
  a.feed_forward_in = s.recompute == Recompute::selective
                          ? a.attention_in
                          : c.matrix("norm outputs", s.compute, s.tokens(), s.config.hidden_size);
  a.activated = c.matrix("SwiGLU outputs", s.compute, s.tokens(), s.config.intermediate_size);
}

void carve_layers(Carver& c, const LlamaSetup& s, Activations& a) {
  for (std::int64_t i = 0; i < s.config.num_hidden_layers; ++i) {
    const bool first = i == 0;
    LayerActivations layer;
    if (first || s.recompute != Recompute::full) {
      layer = carve_layer(c, s);
    } else {
      layer = a.layers.front();
    }
    if (first || s.recompute == Recompute::none) {
      carve_norm_outputs(c, s, layer);
    } else {
      layer.attention_in = a.layers.front().attention_in;
      layer.feed_forward_in = a.layers.front().feed_forward_in;
      layer.activated = a.layers.front().activated;
    }
    layer.input = c.matrix("residual stream", s.compute, s.tokens(), s.config.hidden_size);
    a.layers.push_back(layer);
  }
}

void carve_scratch(Carver& c, const LlamaSetup& s, Activations& a) {
  const Sizes z(s);
  c.begin_shared("scratch of loss and backward");
  a.logits = c.matrix("", s.compute, loss_chunk_tokens(s), s.config.vocab_size);
  c.next_group();
  a.d_activated = c.matrix("", s.compute, z.tokens, z.intermediate);
  a.d_gate_up = c.matrix("", s.compute, z.tokens, 2 * z.intermediate);
  c.next_group();
  a.d_attended = c.matrix("", s.compute, z.tokens, z.queries);
  a.d_qkv = c.matrix("", s.compute, z.tokens, z.queries + 2 * z.keys);
  c.end_shared();
  a.d_query_key = a.d_qkv.block(0, 0, z.tokens, z.queries + z.keys);
  a.d_query = a.d_qkv.block(0, 0, z.tokens, z.queries);
  a.d_key = a.d_qkv.block(0, z.queries, z.tokens, z.keys);
  a.d_value = a.d_qkv.block(0, z.queries + z.keys, z.tokens, z.keys);
}

Activations carve(Carver& c, const LlamaSetup& s) {
  const Sizes z(s);
  Activations a;
  carve_layers(c, s, a);
  a.output = c.matrix("residual stream", s.compute, z.tokens, z.hidden);
  a.output_rstd = c.floats("norm statistics", z.tokens);
  a.branch = c.matrix("residual branch", s.compute, z.tokens, z.hidden);
  a.gradient = c.matrix("residual gradient", s.compute, z.tokens, z.hidden);
  a.normalized = a.gradient;
  a.losses = c.floats("token losses", z.tokens);
  carve_scratch(c, s, a);
  a.cosine = c.floats("rotary tables", s.sequence * s.config.head_dim / 2);
  a.sine = c.floats("rotary tables", s.sequence * s.config.head_dim / 2);
  return a;
}

}  // namespace

Recompute recompute_from(const std::string& name) {
  if (name == "none") return Recompute::none;
  if (name == "selective") return Recompute::selective;
  if (name == "full") return Recompute::full;
  throw UsageError(fmt::format("recompute: '{}', allowed: none, selective, full -> choose one", name));
}

void check_setup(const LlamaSetup& s) {
  check_llama(s.config);
  constexpr std::int64_t most = std::int64_t{1} << 31;  // token positions are counted in 32 bits by kernels
  if (s.batch < 1 || s.sequence < 1 || s.batch >= most || s.sequence >= most || s.tokens() >= most) {
    throw UsageError(
        fmt::format("data.batch_size {} x data.sequence_length {}: allowed are 1 to 2^31 - 1 tokens a "
                    "micro-step -> make one of them smaller",
                    s.batch, s.sequence));
  }
  for (const DType dtype : {s.compute, s.gradient}) {
    if (dtype != DType::f32 && dtype != DType::bf16) {
      throw UsageError(fmt::format(
          "precision: the model computes in fp32 or bf16, not {} -> choose one of these", name_of(dtype)));
    }
  }
}

std::int64_t loss_chunk_tokens(const LlamaSetup& s) {
  const std::int64_t row_bytes = s.config.vocab_size * static_cast<std::int64_t>(size_of(s.compute));
  const std::int64_t fitting = s.logits_bytes / row_bytes / kChunkMultiple * kChunkMultiple;
  return std::min(s.tokens(), std::max(fitting, kChunkMultiple));
}

Workload workload(const LlamaSetup& s) {
  return {s.tokens(),
          s.config.hidden_size,
          s.config.intermediate_size,
          s.config.vocab_size,
          loss_chunk_tokens(s),
          s.attention(),
          s.compute,
          s.gradient};
}

ActivationPlan plan_activations(const LlamaSetup& s) {
  check_setup(s);
  Carver counter(nullptr);
  carve(counter, s);
  return std::move(counter).plan();
}

std::string ActivationPlan::text() const {
  std::string lines;
  for (const Entry& e : entries)
    lines += fmt::format("{:<30}{:>14.1f} MiB\n", e.name, static_cast<double>(e.bytes) / 1048576);
  return lines + fmt::format("{:<30}{:>14.1f} MiB\n", "activations", static_cast<double>(bytes) / 1048576);
}

Activations place_activations(const LlamaSetup& s, void* arena) {
  Carver carver(arena);
  return carve(carver, s);
}

}  // namespace strata
