#include "model/rope.h"

#include <cmath>
#include <numbers>

namespace strata {
namespace {

// The `llama3` rule: wavelengths well inside the original context stay, those beyond it grow by `factor`, and
// in between the two are blended linearly in the number of turns a head makes over the original context.
double stretched(double frequency, const RopeScaling& s) {
  const double turns =
      static_cast<double>(s.original_max_position_embeddings) * frequency / (2 * std::numbers::pi);
  if (turns < s.low_freq_factor) return frequency / s.factor;
  if (turns > s.high_freq_factor) return frequency;
  const double kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1 - kept) * frequency / s.factor + kept * frequency;
}

}  // namespace

std::vector<double> rope_frequencies(const LlamaConfig& config) {
  std::vector<double> frequencies(static_cast<std::size_t>(config.head_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim);
    frequencies[i] = std::pow(config.rope_theta, -exponent);
    if (config.rope_scaling) frequencies[i] = stretched(frequencies[i], *config.rope_scaling);
  }
  return frequencies;
}

RopeTables rope_tables(const LlamaConfig& config, std::int64_t sequence) {
  const std::vector<double> frequencies = rope_frequencies(config);
  RopeTables tables;
  tables.cosine.reserve(static_cast<std::size_t>(sequence) * frequencies.size());
  tables.sine.reserve(tables.cosine.capacity());
  for (std::int64_t position = 0; position < sequence; ++position) {
    for (const double frequency : frequencies) {
      tables.cosine.push_back(static_cast<float>(std::cos(static_cast<double>(position) * frequency)));
      tables.sine.push_back(static_cast<float>(std::sin(static_cast<double>(position) * frequency)));
    }
  }
  return tables;
}

}  // namespace strata
