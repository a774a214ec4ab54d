#pragma once
// The parameters of a Llama, as units: Hugging Face's names and shapes, their places in each unit's flat
// buffer, and how they start. q, k and v lie one after the other, and so do gate and up, so that each group
// is one matrix and one GEMM.
//
//   untied: embedding, decoder.0 ... decoder.L-1, head      tied: root, decoder.0 ... decoder.L-1
#include <cstdint>
#include <vector>

#include "backend/units.h"
#include "config/config.h"

namespace strata {

// Places of a decoder unit's parameters in UnitSpec::parameters.
enum DecoderParameter : int {
  kQuery,
  kKey,
  kValue,
  kOutput,
  kGate,
  kUp,
  kDown,
  kAttentionNorm,
  kFeedForwardNorm
};
// Places in the head, and (the matrix being the embedding's) in the root.
enum EdgeParameter : int { kVocabularyMatrix, kFinalNorm };

// Throws UsageError when no Llama of these sizes can be built; the message names the key and what is allowed.
void check_llama(const LlamaConfig& config);

// Calls check_llama first. Units in the order in which forward asks for them.
std::vector<UnitSpec> llama_units(const LlamaConfig& config);

std::int64_t parameter_count(const std::vector<UnitSpec>& units);

}  // namespace strata
