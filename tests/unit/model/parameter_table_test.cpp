#include "model/parameter_table.h"

#include <functional>
#include <limits>
#include <set>

#include "base/error.h"
#include "tests/support/catch.h"

using namespace strata;

namespace {

LlamaConfig sizes(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads,
                  std::int64_t kv_heads, std::int64_t head_dim, bool tied) {
  LlamaConfig c;
  c.hidden_size = hidden, c.intermediate_size = intermediate, c.num_hidden_layers = layers;
  c.num_attention_heads = heads, c.num_key_value_heads = kv_heads, c.head_dim = head_dim;
  c.vocab_size = 128256, c.max_position_embeddings = 131072, c.tie_word_embeddings = tied;
  return c;
}

std::int64_t count(const LlamaConfig& c) {
  return parameter_count(llama_units(c));
}

}  // namespace

TEST_CASE("parameter counts are the published ones") {
  CHECK(count(sizes(4096, 14336, 32, 32, 8, 128, false)) == 8030261248);   // Llama 3.1 8B
  CHECK(count(sizes(4096, 14336, 32, 32, 8, 128, true)) == 7504924672);    // the same, tied
  CHECK(count(sizes(2048, 8192, 16, 32, 8, 64, true)) == 1235814400);      // Llama 3.2 1B
  CHECK(count(sizes(3072, 8192, 28, 24, 8, 128, true)) == 3212749824);     // Llama 3.2 3B
  CHECK(count(sizes(8192, 28672, 80, 64, 8, 128, false)) == 70553706496);  // Llama 3.1 70B
}

TEST_CASE("units hold their parameters without gaps, in the promised order") {
  for (const bool tied : {false, true}) {
    const auto units = llama_units(sizes(64, 80, 2, 6, 2, 34, tied));
    REQUIRE(units.size() == (tied ? 3 : 4));
    CHECK(units[0].name == (tied ? "root" : "embedding"));
    CHECK(units[0].kind == (tied ? UnitKind::root : UnitKind::embedding));
    CHECK(units[2].name == "decoder.1");
    CHECK(units[2].parameters[kKey].name == "model.layers.1.self_attn.k_proj.weight");
    CHECK(units[2].parameters[kKey].shape == std::vector<std::int64_t>{68, 64});
    CHECK(units[2].parameters[kDown].shape == std::vector<std::int64_t>{64, 80});
    CHECK(units[2].parameters[kFeedForwardNorm].name == "model.layers.1.post_attention_layernorm.weight");
    CHECK(units.back().parameters[kVocabularyMatrix].name ==
          (tied ? "model.layers.1.self_attn.q_proj.weight" : "lm_head.weight"));
    std::set<std::string> names;
    for (const UnitSpec& unit : units) {
      std::int64_t next = 0;
      for (const ParameterSpec& p : unit.parameters) {
        CHECK(p.offset == next);
        CHECK(p.offset % 8 == 0);
        CHECK(p.is_norm == (p.shape.size() == 1));
        CHECK(p.initial_std == (p.is_norm ? 0.0f : 0.02f));
        CHECK(names.insert(p.name).second);
        next += p.count;
      }
      CHECK(unit.elements == next);
    }
    CHECK(names.count("model.norm.weight") == 1);
    CHECK(names.count("lm_head.weight") == (tied ? 0 : 1));
  }
}

TEST_CASE("models that cannot be built are refused by the key that is wrong") {
  const auto refusal = [](const std::function<void(LlamaConfig&)>& change) -> std::string {
    LlamaConfig c = sizes(64, 80, 2, 4, 2, 32, false);
    c.rope_scaling = RopeScaling{};
    change(c);
    try {
      llama_units(c);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "not refused";
  };
  using Catch::Matchers::StartsWith;
  CHECK(refusal([](LlamaConfig&) {}) == "not refused");
  CHECK(refusal([](LlamaConfig& c) { c.head_dim = 256; }) == "not refused");
  CHECK_THAT(refusal([](LlamaConfig& c) { c.hidden_size = 60; }), StartsWith("model.hidden_size: 60"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.hidden_size = 0; }), StartsWith("model.hidden_size: 0"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.intermediate_size = 81; }),
             StartsWith("model.intermediate_size: 81"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.num_hidden_layers = -1; }),
             StartsWith("model.num_hidden_layers: -1"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.head_dim = 33; }), StartsWith("model.head_dim: 33"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.head_dim = 30; }), StartsWith("model.head_dim: 30"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.head_dim = 258; }), StartsWith("model.head_dim: 258"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.num_key_value_heads = 3; }),
             StartsWith("model.num_key_value_heads: 3"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.num_key_value_heads = 8; }),
             StartsWith("model.num_key_value_heads: 8"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.num_attention_heads = 1ll << 40; }),
             StartsWith("model.num_attention_heads: "));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.vocab_size = 0; }), StartsWith("model.vocab_size: 0"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.rms_norm_eps = std::numeric_limits<double>::quiet_NaN(); }),
             StartsWith("model.rms_norm_eps: nan"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.rope_theta = 0; }), StartsWith("model.rope_theta: 0"));
  CHECK_THAT(refusal([](LlamaConfig& c) { c.rope_scaling->high_freq_factor = 1; }),
             StartsWith("model.rope_scaling.high_freq_factor: 1"));
}
