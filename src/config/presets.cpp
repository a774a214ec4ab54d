#include "config/presets.h"

namespace strata {
namespace {

// Meta's published shapes. Llama 3.2 differs from 3.1 in the factor of the rope scaling and in tied
// embeddings.
LlamaConfig llama3(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads,
                   double rope_factor, bool tied) {
  LlamaConfig m;
  m.hidden_size = hidden, m.intermediate_size = intermediate, m.num_hidden_layers = layers;
  m.num_attention_heads = heads, m.num_key_value_heads = 8, m.head_dim = hidden / heads;
  m.vocab_size = 128256, m.max_position_embeddings = 131072;
  m.rope_theta = 500000, m.rms_norm_eps = 1e-5;
  m.rope_scaling = RopeScaling{rope_factor, 1, 4, 8192};
  m.tie_word_embeddings = tied;
  return m;
}

// Models for one machine, with a vocabulary that suits a corpus of some megabytes.
LlamaConfig small(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads,
                  std::int64_t key_value_heads, bool tied) {
  LlamaConfig m;
  m.hidden_size = hidden, m.intermediate_size = intermediate, m.num_hidden_layers = layers;
  m.num_attention_heads = heads, m.num_key_value_heads = key_value_heads, m.head_dim = hidden / heads;
  m.vocab_size = 8192, m.max_position_embeddings = 2048;
  m.tie_word_embeddings = tied;
  return m;
}

}  // namespace

const std::vector<ModelPreset>& model_presets() {
  static const std::vector<ModelPreset> presets = {
      {"llama3.1-8b", llama3(4096, 14336, 32, 32, 8, false)},
      {"llama3.1-70b", llama3(8192, 28672, 80, 64, 8, false)},
      {"llama3.2-1b", llama3(2048, 8192, 16, 32, 32, true)},
      {"llama3.2-3b", llama3(3072, 8192, 28, 24, 32, true)},
      {"llama-5m", small(256, 704, 4, 4, 2, true)},
      {"llama-10m", small(384, 1152, 4, 6, 2, true)},
      {"llama-20m", small(512, 1536, 5, 8, 4, true)},
      {"bench-40m", small(512, 1408, 8, 8, 4, false)},
  };
  return presets;
}

const ModelPreset* find_preset(std::string_view name) {
  for (const ModelPreset& preset : model_presets()) {
    if (preset.name == name) return &preset;
  }
  return nullptr;
}

}  // namespace strata
