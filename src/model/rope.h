#pragma once
// Rotary position embedding: the angles. Position p turns the pair (i, i + D/2) of a head by p *
// frequency[i].
#include <cstdint>
#include <vector>

#include "config/config.h"

namespace strata {

// (D/2) radians a position: theta^(-2i/D), stretched by the `llama3` rule when the model asks for it.
std::vector<double> rope_frequencies(const LlamaConfig& config);

struct RopeTables {
  std::vector<float> cosine, sine;  // (sequence, D/2), computed in fp64 and rounded once
};
RopeTables rope_tables(const LlamaConfig& config, std::int64_t sequence);

}  // namespace strata
