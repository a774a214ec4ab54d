#include "config/load.h"

#include <fmt/format.h>

#include <cstdint>

#include "base/cpu.h"
#include "base/error.h"
#include "config/keys.h"
#include "config/model_config.h"

namespace strata {
namespace {

const char* kind_of(const Json& v) {
  if (v.is_null()) return "null";
  if (v.is_boolean()) return "a boolean";
  if (v.is_number_integer()) return "an integer";
  if (v.is_number()) return "a number";
  if (v.is_string()) return "a string";
  return v.is_array() ? "a list" : "an object";
}

[[noreturn]] void refuse_unknown(const std::string& path, const std::string& source) {
  const std::string shown = show(Json(path));
  const std::string near = nearest_key(path);
  throw UsageError(fmt::format("{}: unknown key {} -> {}", source, shown,
                               near.empty() ? "see `trainer config-reference` for the keys there are"
                                            : fmt::format("did you mean \"{}\"?", near)));
}

// Every key of `object` is in the table, every section is an object.
void check_names(const Json& object, const std::string& prefix, const std::string& source) {
  for (const auto& [name, value] : object.items()) {
    const std::string path = prefix + name;
    if (name.find('.') != std::string::npos) {
      throw UsageError(fmt::format("{}: unknown key {}: a dot does not nest -> write an object in an object",
                                   source, show(Json(path))));
    }
    if (find_key(path) != nullptr) continue;
    if (!is_section(path)) refuse_unknown(path, source);
    if (!value.is_object()) {
      throw UsageError(
          fmt::format("{}: {} is {} ({}); allowed: an object with the keys below it -> correct the value",
                      source, path, show(value), kind_of(value)));
    }
    check_names(value, path + ".", source);
  }
}

const Json* find_value(const Json& root, std::string_view path) {
  const Json* at = &root;
  while (true) {
    const auto dot = path.find('.');
    const auto found = at->find(std::string(path.substr(0, dot)));
    if (found == at->end()) return nullptr;
    at = &*found;
    if (dot == std::string_view::npos) return at;
    path.remove_prefix(dot + 1);
  }
}

// The value of a --set text. Strings may stand without quotes, since shells eat them.
Json set_value(const std::string& path, const std::string& text, const std::string& source) {
  const Key* key = find_key(path);
  const bool takes_text =
      key != nullptr && (key->type == Key::Type::string || key->type == Key::Type::strings);
  const bool quoted =
      text.starts_with('"') || (text.starts_with('[') && key != nullptr && key->type == Key::Type::strings);
  if (!takes_text || quoted || text == "null") return parse_json(text, source);
  Json value(text);
  try {
    (void)value.dump();
  } catch (const Json::exception&) {
    throw UsageError(source + ": the value is not valid UTF-8 -> correct it");
  }
  return value;
}

void apply_set(Json& root, const std::string& text) {
  const auto equals = text.find('=');
  const std::string source = fmt::format("--set {}", show(Json(text)));
  if (equals == std::string::npos || equals == 0) {
    throw UsageError(source + ": expected KEY=VALUE, as in optimizer.lr=1e-4 -> correct it");
  }
  std::string_view path = std::string_view(text).substr(0, equals);
  const std::string whole(path);
  const Json value = set_value(whole, text.substr(equals + 1), source);
  Json* at = &root;
  while (true) {
    if (!at->is_object()) {
      throw UsageError(fmt::format("{}: {} lies below a value that is not an object: {} -> correct the path",
                                   source, whole, show(*at)));
    }
    const auto dot = path.find('.');
    Json& next = (*at)[std::string(path.substr(0, dot))];
    if (dot == std::string_view::npos) {
      next = value;
      return;
    }
    if (next.is_null()) next = Json::object();
    at = &next;
    path.remove_prefix(dot + 1);
  }
}

// Values by rule, where the keys were left out.
void finish_federation(FederationConfig& f) {
  const bool streaming = f.schedule == "streaming";
  const bool averages = f.rule == "fedavg" || f.rule == "fedavgm";
  if (!f.eta) f.eta = averages ? 1.0 : streaming ? 0.4 : 0.7;
  if (!f.momentum && f.rule != "fedavg") f.momentum = 0.9;
  if (!f.alpha && streaming) f.alpha = 0.5;
}

// The hardware decides here, once, so that the resolved configuration says what the run computes in.
void finish_precision(Config& c) {
  if (c.precision != "auto") return;
  c.precision = c.device == "cuda" || cpu_has_bf16_instructions() ? "bf16" : "fp32";
}

// Reads the keys whose path begins with `prefix`.
void read_values(Config& config, const Json& root, const std::string& prefix, const std::string& source) {
  for (const Key& key : keys()) {
    if (!key.path.starts_with(prefix)) continue;
    const Json* value = find_value(root, key.path);
    if (value == nullptr) {
      if (!key.required) continue;
      throw UsageError(fmt::format("{}: {} is missing; it has no default -> add it: {} ({})", source,
                                   key.path, key.doc, describe_allowed(key)));
    }
    if (key.names_model && value->is_null()) continue;
    if (!key.read(config, *value)) {
      throw UsageError(fmt::format("{}: {} is {} ({}); allowed: {} -> correct the value", source, key.path,
                                   show(*value), kind_of(*value), describe_allowed(key)));
    }
  }
}

}  // namespace

LlamaConfig load_model_config(const std::string& path) {
  const Json root = {{"model", expand_model({{"path", path}}, path)}};
  Config config;
  read_values(config, root, "model.", path);
  finish_model(config.model, config.model.max_position_embeddings, path);
  return config.model;
}

Config load_config(const std::string& path, const std::vector<std::string>& sets) {
  return read_config(read_text_file(path, "configuration"), path, sets);
}

Config read_config(const std::string& text, const std::string& source, const std::vector<std::string>& sets) {
  Json root = parse_json(text, source);
  if (!root.is_object()) {
    throw UsageError(fmt::format("{}: holds {} ({}); expected an object -> see `trainer config-reference`",
                                 source, show(root), kind_of(root)));
  }
  for (const std::string& set : sets) apply_set(root, set);
  if (!root.contains("model")) {
    throw UsageError(source +
                     R"(: model is missing -> add "model": {"preset": "llama-10m"} or the model's keys)");
  }
  root["model"] = expand_model(root["model"], source);
  check_names(root, "", source);

  Config config;
  read_values(config, root, "", source);
  finish_model(config.model, config.data.sequence_length, source);
  finish_federation(config.federation);
  finish_precision(config);
  check_config(config, source);
  return config;
}

std::string write_config(const Config& config) {
  Json root = Json::object();
  for (const Key& key : keys()) {
    const Json value = key.write(config);
    if (key.names_model && value.is_null()) continue;
    const auto dot = key.path.find('.');
    if (dot == std::string::npos) {
      root[key.path] = value;
    } else {
      root[key.path.substr(0, dot)][key.path.substr(dot + 1)] = value;
    }
  }
  return root.dump(2) + "\n";
}

}  // namespace strata
