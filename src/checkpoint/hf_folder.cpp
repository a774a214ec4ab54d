#include "checkpoint/hf_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/mapped_read.h"
#include "config/load.h"
#include "model/parameter_table.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kOutputMatrix = "lm_head.weight";
constexpr const char* kEmbeddingMatrix = "model.embed_tokens.weight";
constexpr const char* kAdvice = "copy the folder again, or write it again with save_pretrained";

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) throw DataError(fmt::format("{}: cannot be read -> check the file", path.string()));
  return text.str();
}

// "a, b, c and 12 more"
std::string list(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 4;
  const auto shown = static_cast<std::ptrdiff_t>(std::min(kShown, names.size()));
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

// Old writers stored the rotary frequencies, which follow from the configuration.
bool is_rotary_table(const std::string& name) {
  return name.ends_with(".rotary_emb.inv_freq");
}

struct Half {  // IEEE binary16; every value is exact in fp32
  std::uint16_t bits;
};

float to_float(Half x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u,
                      fraction = x.bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent > 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // zero and the subnormal numbers
  return sign != 0 ? -magnitude : magnitude;
}

template <class T>
void widen(const std::vector<std::byte>& bytes, float* out) {
  for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    T x;
    std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
    out[i] = to_float(x);
  }
}

}  // namespace

std::map<std::string, std::string> parse_hf_index(const std::string& text, const std::string& source) {
  const auto refuse = [&](const std::string& what) {
    throw DataError(fmt::format("{}: {} -> {}", source, what, kAdvice));
  };
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
    refuse("is no index: an object with a weight_map from tensors to files is expected");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : std::string();
    // Files lie beside the index, nowhere else.
    if (name.empty() || fs::path(name).filename() != name)
      refuse(fmt::format("tensor {} is said to lie in {}, which is no file name", tensor, file.dump()));
    files[tensor] = name;
  }
  if (files.empty()) refuse("names no tensors");
  return files;
}

HfFolder::HfFolder(const fs::path& folder) : folder_(folder) {
  model_ = load_model_config((folder / "config.json").string());
  units_ = llama_units(model_);
  open_files();
  check_tensors();
}

void HfFolder::open_files() {
  const fs::path index = folder_ / kIndex;
  std::map<std::string, std::string> indexed;
  std::set<std::string> names;
  if (fs::exists(index)) {
    indexed = parse_hf_index(read_text(index), index.string());
    for (const auto& [tensor, file] : indexed) names.insert(file);
  } else if (fs::exists(folder_ / kWeights)) {
    names.insert(kWeights);
  } else {
    throw DataError(
        fmt::format("{}: holds neither {} nor {} -> give a folder in safetensors format (load another "
                    "one with transformers and save_pretrained it)",
                    folder_.string(), kWeights, kIndex));
  }
  files_.reserve(names.size());  // tensors point into it
  for (const std::string& name : names) {
    const SafetensorsFile& file = files_.emplace_back(folder_ / name);
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto place = indexed.find(entry.name);
      if (!indexed.empty() && (place == indexed.end() || place->second != name))
        throw DataError(
            fmt::format("{}: holds {}, which the index {} -> {}", file.path().string(), entry.name,
                        place == indexed.end() ? "does not name" : "places in " + place->second, kAdvice));
      tensors_[entry.name] = {&file, &entry};
    }
  }
  std::vector<std::string> missing;
  for (const auto& [tensor, file] : indexed)
    if (!tensors_.contains(tensor)) missing.push_back(fmt::format("{} in {}", tensor, file));
  if (!missing.empty())
    throw DataError(
        fmt::format("{}: names what is not there: {} -> {}", index.string(), list(missing), kAdvice));
}

void HfFolder::check_tensors() {
  std::vector<std::string> missing, extra;
  std::set<std::string> known;
  for (const UnitSpec& unit : units_) {
    for (const ParameterSpec& p : unit.parameters) {
      known.insert(p.name);
      const auto found = tensors_.find(p.name);
      if (found == tensors_.end()) {
        missing.push_back(p.name);
        continue;
      }
      const SafetensorsEntry& entry = *found->second.entry;
      const std::string& path = found->second.file->path().string();
      if (entry.shape != p.shape)
        throw DataError(
            fmt::format("{}: {} has shape [{}], the model of config.json needs [{}] -> use the "
                        "config.json that belongs to these weights",
                        path, p.name, fmt::join(entry.shape, ", "), fmt::join(p.shape, ", ")));
      if (!entry.half && entry.dtype != DType::f32 && entry.dtype != DType::bf16)
        throw DataError(fmt::format("{}: {} is {}; weights are fp32, bf16 or fp16 -> convert the folder",
                                    path, p.name, name_of(entry.dtype)));
      if (entry.dtype != DType::bf16) dtype_ = DType::f32;
    }
  }
  if (!missing.empty())
    throw DataError(fmt::format("{}: {} tensor(s) of the model are missing: {} -> {}", folder_.string(),
                                missing.size(), list(missing), kAdvice));
  for (const auto& [name, tensor] : tensors_) {
    if (known.contains(name) || is_rotary_table(name)) continue;
    if (name == kOutputMatrix && model_.tie_word_embeddings) {
      check_tied_output(tensor);
    } else {
      extra.push_back(name);
    }
  }
  if (!extra.empty())
    throw DataError(
        fmt::format("{}: {} tensor(s) are no part of the model that config.json describes: {} -> use "
                    "the config.json that belongs to these weights",
                    folder_.string(), extra.size(), list(extra)));
}

void HfFolder::check_tied_output(const Tensor& output) const {
  const Tensor& embedding = tensors_.at(kEmbeddingMatrix);
  const auto a = output.file->bytes(*output.entry), b = embedding.file->bytes(*embedding.entry);
  if (output.entry->dtype != embedding.entry->dtype || output.entry->half != embedding.entry->half ||
      !std::equal(a.begin(), a.end(), b.begin(), b.end()))
    throw DataError(
        fmt::format("{}: {} differs from {}, but config.json ties them -> set tie_word_embeddings to "
                    "false there",
                    output.file->path().string(), kOutputMatrix, kEmbeddingMatrix));
}

std::vector<float> HfFolder::values(int unit, std::int64_t begin, std::int64_t count) const {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (const ParameterSpec& p : units_.at(static_cast<std::size_t>(unit)).parameters) {
    const std::int64_t from = std::max(begin, p.offset), to = std::min(begin + count, p.offset + p.count);
    if (from < to) read(tensors_.at(p.name), from - p.offset, to - from, out.data() + (from - begin));
  }
  return out;
}

void HfFolder::read(const Tensor& tensor, std::int64_t first, std::int64_t count, float* out) const {
  const SafetensorsEntry& entry = *tensor.entry;
  const std::size_t size = entry.bytes / static_cast<std::size_t>(entry.count);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size);
  const std::byte* from = tensor.file->bytes(entry).data() + static_cast<std::size_t>(first) * size;
  if (!copy_from_mapping(bytes.data(), from, bytes.size()))
    throw DataError(
        fmt::format("{}: {} cannot be read: the file shrank while it was in use, or its disk fails -> "
                    "{}",
                    tensor.file->path().string(), entry.name, kAdvice));
  if (entry.half) {
    widen<Half>(bytes, out);
  } else if (entry.dtype == DType::bf16) {
    widen<bf16>(bytes, out);
  } else {
    std::memcpy(out, bytes.data(), bytes.size());
  }
}

}  // namespace strata
