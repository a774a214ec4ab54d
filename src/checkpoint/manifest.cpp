#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/checksum.h"
#include "config/load.h"

namespace strata {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kFormat = "strata checkpoint";
constexpr int kVersion = 1;

DType dtype_from(const std::string& name) {
  for (const DType t : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::i64, DType::i8})
    if (name == name_of(t)) return t;
  throw std::invalid_argument("unknown dtype " + name);
}

OrderedJson to_json(const CheckpointPiece& p) {
  return OrderedJson::array({p.kind, p.unit, p.group, p.begin, p.count, p.checksum});
}

CheckpointPiece piece_from(const OrderedJson& j) {
  return {j.at(0), j.at(1), j.at(2), j.at(3), j.at(4), j.at(5)};
}

CheckpointManifest from_json(const OrderedJson& j, const std::string& source) {
  CheckpointManifest m;
  m.step = j.at("step");
  m.sequences_consumed = j.at("sequences_consumed");
  m.tokens = j.at("tokens");
  m.data_sequences = j.at("data_sequences");
  m.aggregated = j.at("aggregated");
  m.config = read_config(j.at("config").dump(), source);
  m.counters = j.at("counters").get<std::map<std::string, std::int64_t>>();
  m.token_counts = j.at("token_counts").get<std::vector<std::vector<std::int64_t>>>();
  for (const OrderedJson& k : j.at("kinds"))
    m.kinds.push_back({k.at("name"), dtype_from(k.at("dtype")), k.at("groups")});
  for (const OrderedJson& p : j.at("parts")) {
    CheckpointPart part{p.at("file"), p.at("bytes"), {}};
    for (const OrderedJson& piece : p.at("pieces")) part.pieces.push_back(piece_from(piece));
    m.parts.push_back(std::move(part));
  }
  return m;
}

}  // namespace

const CheckpointKind* CheckpointManifest::find_kind(const std::string& name) const {
  const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.name == name; });
  return found == kinds.end() ? nullptr : &*found;
}

std::string piece_name(const std::string& kind, const std::string& unit) {
  return kind + "." + unit;
}

std::string write_manifest(const CheckpointManifest& m) {
  OrderedJson j;
  j["format"] = kFormat;
  j["version"] = kVersion;
  j["step"] = m.step;
  j["sequences_consumed"] = m.sequences_consumed;
  j["tokens"] = m.tokens;
  j["data_sequences"] = m.data_sequences;
  j["aggregated"] = m.aggregated;
  j["config"] = OrderedJson::parse(write_config(m.config));
  j["counters"] = m.counters;
  j["token_counts"] = m.token_counts;
  j["kinds"] = OrderedJson::array();
  for (const CheckpointKind& k : m.kinds)
    j["kinds"].push_back({{"name", k.name}, {"dtype", name_of(k.dtype)}, {"groups", k.groups}});
  j["parts"] = OrderedJson::array();
  for (const CheckpointPart& part : m.parts) {
    OrderedJson pieces = OrderedJson::array();
    for (const CheckpointPiece& piece : part.pieces) pieces.push_back(to_json(piece));
    j["parts"].push_back({{"file", part.file}, {"bytes", part.bytes}, {"pieces", std::move(pieces)}});
  }
  j["checksum"] = checksum(j.dump());
  return j.dump() + "\n";
}

CheckpointManifest read_manifest(const std::string& text, const std::string& source) {
  const char* advice = "choose another checkpoint";
  OrderedJson j = OrderedJson::parse(text, nullptr, false);
  const auto refuse = [&](const std::string& what) {
    throw DataError(fmt::format("{}: {} -> {}", source, what, advice));
  };
  if (!j.is_object()) refuse("is damaged: it is not a JSON object");
  if (j.value("format", "") != kFormat) refuse("is no manifest of a checkpoint");
  if (!j.contains("checksum") || !j["checksum"].is_string())
    refuse("is damaged: its own checksum is missing");
  const std::string expected = j["checksum"];
  j.erase("checksum");
  const std::string found = checksum(j.dump());
  if (found != expected)
    refuse(fmt::format("is damaged: its checksum is {}, its content has {}", expected, found));
  if (j.value("version", 0) != kVersion)
    refuse(fmt::format("has version {}, this program reads version {}", j.value("version", 0), kVersion));
  try {
    return from_json(j, source);
  } catch (const std::exception& e) {
    refuse(fmt::format("cannot be understood ({})", e.what()));
  }
  return {};
}

}  // namespace strata
