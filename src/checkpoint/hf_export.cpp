#include "checkpoint/hf_export.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/safetensors.h"
#include "config/model_config.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
using Ordered = nlohmann::ordered_json;

constexpr std::array kTokenizerFiles = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "tokenizer.model",
                                        "vocab.json",
                                        "merges.txt",
                                        "added_tokens.json",
                                        "chat_template.jinja",
                                        "generation_config.json"};
constexpr std::int64_t kPiece = std::int64_t{1} << 24;  // elements in memory at once

struct Tensor {
  int unit = 0;
  const ParameterSpec* parameter = nullptr;
};

// Tensors by file: a file is closed when the next tensor would make it too large.
std::vector<std::vector<Tensor>> split(const ModelWeights& weights, const HfExportOptions& options) {
  std::vector<std::vector<Tensor>> files(1);
  std::uint64_t filled = 0;
  for (std::size_t u = 0; u < weights.units().size(); ++u) {
    for (const ParameterSpec& p : weights.units()[u].parameters) {
      const std::uint64_t bytes = static_cast<std::uint64_t>(p.count) * size_of(options.dtype);
      if (!files.back().empty() && filled + bytes > options.largest_file) files.emplace_back(), filled = 0;
      files.back().push_back({static_cast<int>(u), &p});
      filled += bytes;
    }
  }
  return files;
}

void append(SafetensorsWriter& writer, const std::vector<float>& values, DType dtype) {
  if (dtype == DType::f32) return writer.append(std::as_bytes(std::span(values)));
  std::vector<bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), to_bf16);
  writer.append(std::as_bytes(std::span(rounded)));
}

void write_tensors(const ModelWeights& weights, const fs::path& path, const std::vector<Tensor>& tensors,
                   DType dtype) {
  std::vector<SafetensorsSpec> specs;
  for (const Tensor& t : tensors) specs.push_back({t.parameter->name, dtype, t.parameter->shape});
  SafetensorsWriter writer(path, specs, {{"format", "pt"}});  // transformers refuses files without it
  for (const Tensor& t : tensors) {
    for (std::int64_t at = 0; at < t.parameter->count; at += kPiece) {
      const std::int64_t count = std::min(kPiece, t.parameter->count - at);
      append(writer, weights.values(t.unit, t.parameter->offset + at, count), dtype);
    }
  }
  writer.finish();
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out)
    throw DataError(fmt::format("{}: cannot be written -> check permissions and free space", path.string()));
}

void write_weights(const ModelWeights& weights, const fs::path& folder, const HfExportOptions& options) {
  const auto files = split(weights, options);
  if (files.size() == 1) return write_tensors(weights, folder / "model.safetensors", files[0], options.dtype);
  Ordered map = Ordered::object();
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    write_tensors(weights, folder / name, files[i], options.dtype);
    for (const Tensor& t : files[i]) {
      map[t.parameter->name] = name;
      total += static_cast<std::uint64_t>(t.parameter->count) * size_of(options.dtype);
    }
  }
  const Ordered index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  write_text(folder / "model.safetensors.index.json", index.dump(2) + "\n");
}

std::vector<fs::path> tokenizer_files(const std::vector<fs::path>& given) {
  std::vector<fs::path> files;
  for (const fs::path& path : given) {
    if (!fs::is_directory(path)) {
      if (!fs::is_regular_file(path))
        throw UsageError(
            fmt::format("{}: no such tokenizer file or folder -> check --tokenizer", path.string()));
      files.push_back(path);
      continue;
    }
    const std::size_t before = files.size();
    for (const char* name : kTokenizerFiles)
      if (fs::is_regular_file(path / name)) files.push_back(path / name);
    if (files.size() == before)
      throw UsageError(fmt::format(
          "{}: holds none of a tokenizer's files (tokenizer.json ...) -> check --tokenizer", path.string()));
  }
  for (const fs::path& file : files) {
    const std::string name = file.filename().string();
    if (name == "config.json" || name.starts_with("model"))
      throw UsageError(fmt::format(
          "{}: would take the place of the model's own file -> leave it out of --tokenizer", file.string()));
  }
  return files;
}

}  // namespace

std::string hf_config(const LlamaConfig& m, DType dtype) {
  // Which ids begin and end a text is the tokenizer's affair; left out, they would be those of Llama 2.
  const Ordered config = {{"architectures", {"LlamaForCausalLM"}},
                          {"attention_bias", false},
                          {"attention_dropout", 0.0},
                          {"bos_token_id", nullptr},
                          {"eos_token_id", nullptr},
                          {"head_dim", m.head_dim},
                          {"hidden_act", "silu"},
                          {"hidden_size", m.hidden_size},
                          {"initializer_range", m.initializer_range},
                          {"intermediate_size", m.intermediate_size},
                          {"max_position_embeddings", m.max_position_embeddings},
                          {"mlp_bias", false},
                          {"model_type", "llama"},
                          {"num_attention_heads", m.num_attention_heads},
                          {"num_hidden_layers", m.num_hidden_layers},
                          {"num_key_value_heads", m.num_key_value_heads},
                          {"pretraining_tp", 1},
                          {"rms_norm_eps", m.rms_norm_eps},
                          {"rope_scaling", write_rope_scaling(m.rope_scaling)},
                          {"rope_theta", m.rope_theta},
                          {"tie_word_embeddings", m.tie_word_embeddings},
                          {"torch_dtype", dtype == DType::bf16 ? "bfloat16" : "float32"},
                          {"use_cache", true},
                          {"vocab_size", m.vocab_size}};
  return config.dump(2) + "\n";
}

void export_hf(const ModelWeights& weights, const fs::path& folder, const HfExportOptions& options) {
  fs::path out = fs::absolute(folder).lexically_normal();
  if (!out.has_filename()) out = out.parent_path();  // "folder/"
  const std::vector<fs::path> tokenizer = tokenizer_files(options.tokenizer);
  std::error_code error;
  if (fs::exists(out, error) && !(fs::is_directory(out, error) && fs::is_empty(out, error)))
    throw UsageError(fmt::format("{}: exists and is not an empty folder -> choose another --out or remove it",
                                 out.string()));
  const fs::path partial = out.string() + ".partial";
  fs::remove_all(partial, error);
  fs::create_directories(partial, error);
  if (error) throw DataError(fmt::format("{}: {} -> check the path", partial.string(), error.message()));
  write_weights(weights, partial, options);
  write_text(partial / "config.json", hf_config(weights.model(), options.dtype));
  for (const fs::path& file : tokenizer) {
    fs::copy_file(file, partial / file.filename(), fs::copy_options::overwrite_existing, error);
    if (error) throw DataError(fmt::format("{}: cannot be copied: {}", file.string(), error.message()));
  }
  fs::remove(out, error);  // an empty folder
  fs::rename(partial, out, error);
  if (error) throw DataError(fmt::format("{}: {} -> check the path", out.string(), error.message()));
}

}  // namespace strata
