#pragma once
#include <cstdint>
#include <optional>

#include "config/config.h"

namespace strata {

// Floating-point operations of forward and backward a token: 6 for every weight of a matrix product (the
// embedding look-up is none) plus causal attention, 6 L T Hq D (two products of 2 T/2 D a head forward, twice
// that backward). Recomputation is not counted: this is the model's work, not the machine's.
double model_flops_per_token(const LlamaConfig& model, std::int64_t sequence_length);

// Share of the rank's peak (config peak_tflops, dense, at the run's precision); empty when that is unknown.
std::optional<double> model_flops_utilization(const Config& config, double tokens_per_second_per_rank);

}  // namespace strata
