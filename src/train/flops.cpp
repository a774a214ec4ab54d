#include "train/flops.h"

namespace strata {

double model_flops_per_token(const LlamaConfig& m, std::int64_t sequence_length) {
  const double C = static_cast<double>(m.hidden_size), D = static_cast<double>(m.head_dim);
  const double Hq = static_cast<double>(m.num_attention_heads),
               Hkv = static_cast<double>(m.num_key_value_heads);
  const double layers = static_cast<double>(m.num_hidden_layers);
  const double layer = C * D * (Hq + 2 * Hkv) + Hq * D * C + 3 * C * static_cast<double>(m.intermediate_size);
  const double weights = layers * layer + C * static_cast<double>(m.vocab_size);
  return 6 * weights + 6 * layers * static_cast<double>(sequence_length) * Hq * D;
}

std::optional<double> model_flops_utilization(const Config& config, double tokens_per_second_per_rank) {
  if (!config.peak_tflops) return std::nullopt;
  return model_flops_per_token(config.model, config.data.sequence_length) * tokens_per_second_per_rank /
         (*config.peak_tflops * 1e12);
}

}  // namespace strata
