#include "model/parameter_table.h"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"

namespace strata {
namespace {

// Far above any Llama, far below where a product of sizes leaves 64 bits.
constexpr std::int64_t kLargestWidth = 1 << 20, kLargestVocabulary = 1 << 24, kMostLayers = 1 << 14;

void require(bool ok, const char* key, const std::string& found, const std::string& allowed) {
  if (!ok)
    throw UsageError(
        fmt::format("model.{}: {}, allowed: {} -> correct the model's configuration", key, found, allowed));
}

void check_size(const char* key, std::int64_t value, std::int64_t largest, std::int64_t multiple = 1) {
  const std::string allowed = multiple == 1
                                  ? fmt::format("1 to {}", largest)
                                  : fmt::format("multiples of {} from {} to {}", multiple, multiple, largest);
  require(value >= 1 && value <= largest && value % multiple == 0, key, std::to_string(value), allowed);
}

void check_positive(const char* key, double value) {
  require(std::isfinite(value) && value > 0, key, fmt::format("{}", value), "finite numbers above 0");
}

// Lays parameters one after the other into a unit.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, UnitKind kind, const LlamaConfig& config)
      : unit_{std::move(name), kind, {}, 0}, std_(static_cast<float>(config.initializer_range)) {}

  UnitBuilder& matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    return add({name, {rows, cols}, unit_.elements, rows * cols, std_, false});
  }
  UnitBuilder& norm(const std::string& name, std::int64_t size) {
    return add({name, {size}, unit_.elements, size, 0, true});
  }
  UnitSpec build() { return std::move(unit_); }

 private:
  UnitBuilder& add(ParameterSpec p) {
    unit_.elements += p.count;
    unit_.parameters.push_back(std::move(p));
    return *this;
  }
  UnitSpec unit_;
  float std_;
};

UnitSpec decoder_unit(const LlamaConfig& c, std::int64_t layer) {
  const std::int64_t queries = c.num_attention_heads * c.head_dim, keys = c.num_key_value_heads * c.head_dim;
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  return UnitBuilder(fmt::format("decoder.{}", layer), UnitKind::decoder, c)
      .matrix(prefix + "self_attn.q_proj.weight", queries, c.hidden_size)
      .matrix(prefix + "self_attn.k_proj.weight", keys, c.hidden_size)
      .matrix(prefix + "self_attn.v_proj.weight", keys, c.hidden_size)
      .matrix(prefix + "self_attn.o_proj.weight", c.hidden_size, queries)
      .matrix(prefix + "mlp.gate_proj.weight", c.intermediate_size, c.hidden_size)
      .matrix(prefix + "mlp.up_proj.weight", c.intermediate_size, c.hidden_size)
      .matrix(prefix + "mlp.down_proj.weight", c.hidden_size, c.intermediate_size)
      .norm(prefix + "input_layernorm.weight", c.hidden_size)
      .norm(prefix + "post_attention_layernorm.weight", c.hidden_size)
      .build();
}

}  // namespace

void check_llama(const LlamaConfig& c) {
  // Multiples of 8: every parameter then starts on 16 bytes of its unit's flat buffer, whatever the dtype.
  check_size("hidden_size", c.hidden_size, kLargestWidth, 8);
  check_size("intermediate_size", c.intermediate_size, kLargestWidth, 8);
  check_size("num_hidden_layers", c.num_hidden_layers, kMostLayers);
  check_size("vocab_size", c.vocab_size, kLargestVocabulary);
  require(c.head_dim >= 32 && c.head_dim <= 256 && c.head_dim % 2 == 0, "head_dim",
          std::to_string(c.head_dim), "even sizes from 32 to 256");
  check_size("num_attention_heads", c.num_attention_heads, kLargestWidth / c.head_dim);
  check_size("num_key_value_heads", c.num_key_value_heads, c.num_attention_heads);
  require(c.num_attention_heads % c.num_key_value_heads == 0, "num_key_value_heads",
          std::to_string(c.num_key_value_heads),
          fmt::format("divisors of num_attention_heads ({})", c.num_attention_heads));
  check_positive("rope_theta", c.rope_theta);
  check_positive("rms_norm_eps", c.rms_norm_eps);
  check_positive("initializer_range", c.initializer_range);
  if (!c.rope_scaling) return;
  check_positive("rope_scaling.factor", c.rope_scaling->factor);
  check_positive("rope_scaling.low_freq_factor", c.rope_scaling->low_freq_factor);
  check_size("rope_scaling.original_max_position_embeddings",
             c.rope_scaling->original_max_position_embeddings, std::int64_t{1} << 31);
  require(std::isfinite(c.rope_scaling->high_freq_factor) &&
              c.rope_scaling->high_freq_factor > c.rope_scaling->low_freq_factor,
          "rope_scaling.high_freq_factor", fmt::format("{}", c.rope_scaling->high_freq_factor),
          fmt::format("finite numbers above low_freq_factor ({})", c.rope_scaling->low_freq_factor));
}

std::vector<UnitSpec> llama_units(const LlamaConfig& c) {
  check_llama(c);
  const char *embedding = "model.embed_tokens.weight", *norm = "model.norm.weight";
  std::vector<UnitSpec> units;
  if (c.tie_word_embeddings) {
    units.push_back(UnitBuilder("root", UnitKind::root, c)
                        .matrix(embedding, c.vocab_size, c.hidden_size)
                        .norm(norm, c.hidden_size)
                        .build());
  } else {
    units.push_back(UnitBuilder("embedding", UnitKind::embedding, c)
                        .matrix(embedding, c.vocab_size, c.hidden_size)
                        .build());
  }
  for (std::int64_t layer = 0; layer < c.num_hidden_layers; ++layer) units.push_back(decoder_unit(c, layer));
  if (!c.tie_word_embeddings) {
    units.push_back(UnitBuilder("head", UnitKind::head, c)
                        .matrix("lm_head.weight", c.vocab_size, c.hidden_size)
                        .norm(norm, c.hidden_size)
                        .build());
  }
  return units;
}

std::int64_t parameter_count(const std::vector<UnitSpec>& units) {
  return std::transform_reduce(units.begin(), units.end(), std::int64_t{0}, std::plus<>(),
                               [](const UnitSpec& unit) { return unit.elements; });
}

}  // namespace strata
