#include "checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "checkpoint/checksum.h"
#include "checkpoint/folder.h"
#include "model/parameter_table.h"

namespace strata {
namespace {

constexpr const char* kAdvice = "restore the file from a copy, or use another checkpoint";

}  // namespace

std::vector<float> widen(std::span<const std::byte> bytes, DType dtype) {
  std::vector<float> values(bytes.size() / size_of(dtype));
  if (dtype == DType::f32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    bf16 x;
    std::memcpy(&x, bytes.data() + i * sizeof x, sizeof x);
    values[i] = to_float(x);
  }
  return values;
}

Checkpoint::Checkpoint(const std::filesystem::path& folder)
    : Checkpoint(folder, read_manifest(read_manifest_text(folder), (folder / kManifestFile).string())) {}

Checkpoint::Checkpoint(std::filesystem::path folder, CheckpointManifest manifest)
    : folder_(std::move(folder)),
      manifest_(std::move(manifest)),
      units_(llama_units(manifest_.config.model)) {
  index();
}

void Checkpoint::index() {
  const std::string source = (folder_ / kManifestFile).string();
  for (std::size_t part = 0; part < manifest_.parts.size(); ++part) {
    for (const CheckpointPiece& piece : manifest_.parts[part].pieces) {
      if (piece.unit < 0 || piece.unit >= static_cast<int>(units_.size()))
        throw DataError(
            fmt::format("{}: names unit {} of {} -> {}", source, piece.unit, units_.size(), kAdvice));
      places_[{piece.kind, {piece.unit, piece.group}}].push_back({static_cast<int>(part), &piece});
    }
  }
  for (auto& [key, places] : places_) {
    const auto& unit = units_[static_cast<std::size_t>(key.second.first)];
    std::sort(places.begin(), places.end(),
              [](const Place& a, const Place& b) { return a.piece->begin < b.piece->begin; });
    std::int64_t covered = 0;
    for (const Place& place : places) {
      if (place.piece->begin != covered || place.piece->count <= 0) break;
      covered += place.piece->count;
    }
    if (covered != unit.elements || manifest_.find_kind(key.first) == nullptr)
      throw DataError(fmt::format("{}: the pieces of {} of group {} do not cover its {} elements -> {}",
                                  source, piece_name(key.first, unit.name), key.second.second, unit.elements,
                                  kAdvice));
  }
  for (int u = 0; u < static_cast<int>(units_.size()); ++u)
    for (int g = 0; g < groups(); ++g)
      if (!places_.contains({kind::parameter, {u, g}}))
        throw DataError(fmt::format("{}: lacks {} of group {} -> {}", source,
                                    piece_name(kind::parameter, units_[static_cast<std::size_t>(u)].name), g,
                                    kAdvice));
}

int Checkpoint::groups() const {
  const CheckpointKind* parameter = manifest_.find_kind(kind::parameter);
  if (parameter == nullptr)
    throw DataError(fmt::format("{}: holds no parameters -> {}", folder_.string(), kAdvice));
  return parameter->groups;
}

DType Checkpoint::parameter_dtype() const {
  return manifest_.find_kind(kind::parameter)->dtype;
}

std::vector<const ParameterSpec*> Checkpoint::parameters() const {
  std::vector<const ParameterSpec*> all;
  for (const UnitSpec& unit : units_)
    for (const ParameterSpec& p : unit.parameters) all.push_back(&p);
  return all;
}

std::pair<int, const ParameterSpec*> Checkpoint::find_parameter(const std::string& name) const {
  for (std::size_t u = 0; u < units_.size(); ++u)
    for (const ParameterSpec& p : units_[u].parameters)
      if (p.name == name) return {static_cast<int>(u), &p};
  throw DataError(fmt::format("{}: has no parameter '{}' -> see `trainer inspect`", folder_.string(), name));
}

const SafetensorsFile& Checkpoint::open(int part) const {
  const auto found = open_.find(part);
  if (found != open_.end()) return found->second;
  const CheckpointPart& expected = manifest_.parts[static_cast<std::size_t>(part)];
  const std::filesystem::path path = folder_ / expected.file;
  await_visible(path);
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error)
    throw DataError(fmt::format("{}: cannot be opened ({}) -> {}", path.string(), error.message(), kAdvice));
  if (bytes != expected.bytes)
    throw DataError(fmt::format("{}: has {} bytes, the manifest says {} -> {}", path.string(), bytes,
                                expected.bytes, kAdvice));
  return open_.emplace(part, SafetensorsFile(path)).first->second;
}

std::span<const std::byte> Checkpoint::bytes_of(const Place& place) const {
  const CheckpointPiece& piece = *place.piece;
  const SafetensorsFile& file = open(place.part);
  const std::string name = piece_name(piece.kind, units_[static_cast<std::size_t>(piece.unit)].name);
  const SafetensorsEntry& entry = file.at(name);
  if (entry.dtype != manifest_.find_kind(piece.kind)->dtype || entry.count != piece.count)
    throw DataError(fmt::format("{}: tensor {} is {} x {}, the manifest says {} x {} -> {}",
                                path_of(place.part), name, entry.count, name_of(entry.dtype), piece.count,
                                name_of(manifest_.find_kind(piece.kind)->dtype), kAdvice));
  const std::span<const std::byte> bytes = file.bytes(entry);
  if (verified_.contains(&piece)) return bytes;
  const std::string found = checksum(bytes);
  if (found != piece.checksum)
    throw DataError(
        fmt::format("{}: tensor {} ({} bytes at byte {}) has checksum {}, the manifest says {} -> {}",
                    path_of(place.part), name, entry.bytes, entry.offset, found, piece.checksum, kAdvice));
  verified_.insert(&piece);
  return bytes;
}

bool Checkpoint::has(const std::string& kind, int unit) const {
  return places_.contains({kind, {unit, 0}});
}

std::vector<std::byte> Checkpoint::read(const std::string& kind, int unit, int group, std::int64_t begin,
                                        std::int64_t count) const {
  const CheckpointKind* stored = manifest_.find_kind(kind);
  if (stored != nullptr && stored->groups == 1) group = 0;
  const auto found = places_.find({kind, {unit, group}});
  const std::string& unit_name = units_.at(static_cast<std::size_t>(unit)).name;
  if (stored == nullptr || found == places_.end())
    throw DataError(fmt::format("{}: holds no {} of group {} -> {}", folder_.string(),
                                piece_name(kind, unit_name), group, kAdvice));
  const std::size_t size = size_of(stored->dtype);
  std::vector<std::byte> out(static_cast<std::size_t>(count) * size);
  for (const Place& place : found->second) {
    const std::int64_t from = std::max(begin, place.piece->begin);
    const std::int64_t to = std::min(begin + count, place.piece->begin + place.piece->count);
    if (from >= to) continue;
    const auto bytes = bytes_of(place);
    std::memcpy(out.data() + static_cast<std::size_t>(from - begin) * size,
                bytes.data() + static_cast<std::size_t>(from - place.piece->begin) * size,
                static_cast<std::size_t>(to - from) * size);
  }
  return out;
}

std::vector<std::byte> Checkpoint::parameter_bytes(const std::string& name, int group) const {
  const auto [unit, p] = find_parameter(name);
  return read(kind::parameter, unit, group, p->offset, p->count);
}

std::vector<float> Checkpoint::parameter(const std::string& name, int group) const {
  return widen(parameter_bytes(name, group), parameter_dtype());
}

std::vector<float> Checkpoint::average_parameter(const std::string& name) const {
  if (groups() == 1) return parameter(name);
  std::vector<double> sum;
  for (int g = 0; g < groups(); ++g) {
    const std::vector<float> one = parameter(name, g);
    sum.resize(one.size(), 0.0);
    for (std::size_t i = 0; i < one.size(); ++i) sum[i] += one[i];
  }
  std::vector<float> mean(sum.size());
  for (std::size_t i = 0; i < sum.size(); ++i) mean[i] = static_cast<float>(sum[i] / groups());
  return mean;
}

void Checkpoint::verify() const {
  for (const auto& [key, places] : places_)
    for (const Place& place : places) bytes_of(place);
}

std::uint64_t Checkpoint::bytes() const {
  std::uint64_t all = 0;
  for (const CheckpointPart& part : manifest_.parts) all += part.bytes;
  return all;
}

}  // namespace strata
