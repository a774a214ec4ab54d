#pragma once
// Writes a model as a folder that Hugging Face's transformers loads: config.json, safetensors (in several
// files with an index when they would grow too large), and the tokenizer's files.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/model_weights.h"

namespace strata {

struct HfExportOptions {
  DType dtype = DType::f32;  // fp32 or bf16 (rounded to nearest even)
  // Of the tensors in one file, as save_pretrained counts them; a larger tensor has a file for itself.
  std::uint64_t largest_file = 5'000'000'000;
  // Files to copy, or folders whose tokenizer files are copied.
  std::vector<std::filesystem::path> tokenizer;
};

// Writes into <out>.partial and renames it at the end. Throws UsageError when `out` exists and is not empty,
// or a tokenizer file is not there; DataError when it cannot write.
void export_hf(const ModelWeights& weights, const std::filesystem::path& out, const HfExportOptions& options);

// The text of config.json: a LlamaForCausalLM with its RoPE scaling.
std::string hf_config(const LlamaConfig& model, DType dtype);

}  // namespace strata
