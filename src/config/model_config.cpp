#include "config/model_config.h"

#include <fmt/format.h>

#include <cmath>
#include <set>
#include <string_view>

#include "base/error.h"
#include "config/keys.h"
#include "config/presets.h"

namespace strata {
namespace {

// Keys of config.json that say nothing about the mathematics of training from tokens.
const std::set<std::string_view>& harmless_keys() {
  static const std::set<std::string_view> keys = {"_name_or_path",
                                                  "architectures",
                                                  "torch_dtype",
                                                  "dtype",
                                                  "bos_token_id",
                                                  "eos_token_id",
                                                  "pad_token_id",
                                                  "use_cache",
                                                  "model_type",
                                                  "transformers_version",
                                                  "return_dict",
                                                  "output_attentions",
                                                  "rope_interleaved",
                                                  "output_hidden_states",
                                                  "_attn_implementation",
                                                  "attn_implementation",
                                                  "use_return_dict",
                                                  "is_decoder",
                                                  "id2label",
                                                  "label2id",
                                                  "problem_type",
                                                  "chunk_size_feed_forward",
                                                  "tokenizer_class",
                                                  "unk_token_id",
                                                  "auto_map"};
  return keys;
}

// Keys that would change it unless they have one of these values; null counts as absent.
struct Demand {
  std::string_view key;
  std::vector<Json> allowed;
  std::string_view why;
};
const std::vector<Demand>& demands() {
  static const std::vector<Demand> list = {
      {"model_type", {"llama"}, "only Llama-class decoders are trained"},
      {"hidden_act", {"silu", "swish"}, "the feed-forward layer is SwiGLU"},
      {"hidden_activation", {"silu", "swish"}, "the feed-forward layer is SwiGLU"},
      {"attention_bias", {false}, "linear layers have no bias"},
      {"mlp_bias", {false}, "linear layers have no bias"},
      {"attention_dropout", {0, 0.0}, "there is no dropout"},
      {"hidden_dropout", {0, 0.0}, "there is no dropout"},
      {"sliding_window", {}, "attention sees the whole sequence"},
      {"use_sliding_window", {false}, "attention sees the whole sequence"},
      {"pretraining_tp", {0, 1}, "linear layers are not split"},
      {"partial_rotary_factor", {1, 1.0}, "the whole head is rotated"},
      {"rope_interleaved", {false}, "halves of a head rotate together"},
      {"attn_logit_softcapping", {}, "scores are not capped"},
      {"final_logit_softcapping", {}, "logits are not capped"},
      {"quantization_config", {}, "weights are not quantized"},
      {"is_encoder_decoder", {false}, "only decoders are trained"},
      {"add_cross_attention", {false}, "only decoders are trained"},
      {"tie_encoder_decoder", {false}, "only decoders are trained"},
  };
  return list;
}

[[noreturn]] void refuse(const std::string& source, const std::string& path, const Json& value,
                         const std::string& allowed, const std::string& advice) {
  throw UsageError(
      fmt::format("{}: {} is {}; allowed: {} -> {}", source, path, show(value), allowed, advice));
}

// True when `key` is one of Hugging Face's that is dealt with here and must not reach the table.
bool is_foreign(const std::string& key, const Json& value, const std::string& source) {
  bool known = harmless_keys().contains(key);
  for (const Demand& demand : demands()) {
    if (demand.key != key) continue;
    known = true;
    bool fits = value.is_null();
    std::vector<std::string> texts;
    for (const Json& allowed : demand.allowed) {
      fits = fits || value == allowed;
      texts.push_back(show(allowed));
    }
    if (!fits) {
      texts.push_back("null");
      refuse(source, "model." + key, value, fmt::format("{} ({})", fmt::join(texts, " | "), demand.why),
             "this model cannot be trained here");
    }
  }
  return known;
}

// transformers 5 writes rope_theta and the scaling into one object.
void split_rope_parameters(Json& model, const std::string& source) {
  const auto found = model.find("rope_parameters");
  if (found == model.end()) return;
  Json scaling = *found;
  model.erase("rope_parameters");
  if (scaling.is_null()) return;
  if (!scaling.is_object()) {
    refuse(source, "model.rope_parameters", scaling, "null or an object", "correct the value");
  }
  if (const auto theta = scaling.find("rope_theta"); theta != scaling.end()) {
    model["rope_theta"] = *theta;
    scaling.erase("rope_theta");
  }
  if (const auto part = scaling.find("partial_rotary_factor"); part != scaling.end()) {
    is_foreign("partial_rotary_factor", *part, source);
    scaling.erase("partial_rotary_factor");
  }
  if (!scaling.empty()) model["rope_scaling"] = scaling;
}

// The keys of a Hugging Face object that the table knows.
Json known_part(const Json& object, const std::string& source) {
  Json out = Json::object();
  for (const auto& [key, value] : object.items()) {
    if (key == "preset" || key == "path" || is_foreign(key, value, source)) continue;
    out[key] = value;
  }
  split_rope_parameters(out, source);
  return out;
}

Json preset_object(const Json& name, const std::string& source) {
  const ModelPreset* preset = name.is_string() ? find_preset(name.get<std::string>()) : nullptr;
  const Key& key = *find_key("model.preset");
  if (preset == nullptr)
    refuse(source, key.path, name, describe_allowed(key), "choose a preset or give the keys");
  Config config;
  config.model = preset->model, config.model_preset = preset->name;
  Json out = Json::object();
  for (const Key& row : keys()) {
    if (row.path.starts_with("model.")) out[row.path.substr(6)] = row.write(config);
  }
  return out;
}

Json file_object(const Json& path, const std::string& source) {
  if (!path.is_string() || path.get<std::string>().empty()) {
    refuse(source, "model.path", path, "the path of a Hugging Face config.json", "correct the value");
  }
  const std::string file = path.get<std::string>();
  const Json object = parse_json(read_text_file(file, "model description"), file);
  if (!object.is_object()) {
    throw UsageError(fmt::format(
        "{}: holds {}; expected an object with Hugging Face's keys -> check model.path", file, show(object)));
  }
  Json out = known_part(object, file);
  for (const auto& [key, value] : out.items()) {
    if (key == "preset" || find_key("model." + key) == nullptr) {
      throw UsageError(
          fmt::format("{}: {} is not known, so it may change the model -> remove it from a copy of the file "
                      "if it does not",
                      file, key));
    }
  }
  // Hugging Face's defaults, where they differ from ours.
  if (!out.contains("rms_norm_eps")) out["rms_norm_eps"] = 1e-6;
  if (!out.contains("max_position_embeddings")) out["max_position_embeddings"] = 2048;
  return out;
}

}  // namespace

Json expand_model(const Json& model, const std::string& source) {
  if (!model.is_object()) {
    refuse(source, "model", model,
           R"({"preset": NAME}, {"path": "config.json"} or an object with the model's keys)",
           "correct the value");
  }
  const Json preset = model.value("preset", Json(nullptr)), path = model.value("path", Json(nullptr));
  if (!preset.is_null() && !path.is_null()) {
    throw UsageError(source + ": model.preset and model.path are both given -> keep one of them");
  }
  Json out = !preset.is_null() ? preset_object(preset, source)
             : !path.is_null() ? file_object(path, source)
                               : Json::object();
  const Json overrides = known_part(model, source);
  for (const auto& [key, value] : overrides.items()) {
    Json& target = out[key];
    // rope_scaling of the preset or file, with some of its values changed.
    if (target.is_object() && value.is_object()) {
      target.update(value);
    } else {
      target = value;
    }
  }
  return out;
}

bool read_rope_scaling(const Json& value, std::optional<RopeScaling>& out) {
  if (value.is_null()) {
    out.reset();
    return true;
  }
  if (!value.is_object()) return false;
  const Json kind = value.contains("rope_type") ? value["rope_type"] : value.value("type", Json(nullptr));
  if (kind == "default") {
    out.reset();
    return true;
  }
  if (kind != "llama3") return false;
  RopeScaling scaling;
  const std::pair<const char*, double*> numbers[] = {{"factor", &scaling.factor},
                                                     {"low_freq_factor", &scaling.low_freq_factor},
                                                     {"high_freq_factor", &scaling.high_freq_factor}};
  for (const auto& [name, target] : numbers) {
    if (!value.contains(name) || !value[name].is_number()) return false;
    *target = value[name].get<double>();
    if (!std::isfinite(*target) || *target <= 0) return false;
  }
  const char* original = "original_max_position_embeddings";
  if (!value.contains(original) || !value[original].is_number_integer()) return false;
  scaling.original_max_position_embeddings = value[original].get<std::int64_t>();
  for (const auto& [key, ignored] : value.items()) {
    const bool known = key == "rope_type" || key == "type" || key == original || key == "factor" ||
                       key == "low_freq_factor" || key == "high_freq_factor";
    if (!known) return false;
  }
  if (scaling.original_max_position_embeddings < 1 || scaling.factor < 1 ||
      scaling.high_freq_factor <= scaling.low_freq_factor) {
    return false;
  }
  out = scaling;
  return true;
}

Json write_rope_scaling(const std::optional<RopeScaling>& scaling) {
  if (!scaling) return nullptr;
  return {{"rope_type", "llama3"},
          {"factor", scaling->factor},
          {"low_freq_factor", scaling->low_freq_factor},
          {"high_freq_factor", scaling->high_freq_factor},
          {"original_max_position_embeddings", scaling->original_max_position_embeddings}};
}

void finish_model(LlamaConfig& m, std::int64_t sequence_length, const std::string& source) {
  auto need = [&](bool holds, const char* key, std::int64_t value, const std::string& allowed,
                  const std::string& advice) {
    if (!holds) refuse(source, std::string("model.") + key, value, allowed, advice);
  };
  need(m.hidden_size % 8 == 0, "hidden_size", m.hidden_size, "multiples of 8", "round it up");
  need(m.intermediate_size % 8 == 0, "intermediate_size", m.intermediate_size, "multiples of 8",
       "round it up");
  if (m.num_key_value_heads == 0) m.num_key_value_heads = m.num_attention_heads;
  need(m.num_attention_heads % m.num_key_value_heads == 0, "num_key_value_heads", m.num_key_value_heads,
       fmt::format("divisors of num_attention_heads = {}", m.num_attention_heads), "change one of the two");
  if (m.head_dim == 0) {
    need(m.hidden_size % m.num_attention_heads == 0, "num_attention_heads", m.num_attention_heads,
         fmt::format("divisors of hidden_size = {} unless head_dim is given", m.hidden_size),
         "change one of the two or give head_dim");
    m.head_dim = m.hidden_size / m.num_attention_heads;
  }
  need(m.head_dim % 2 == 0 && m.head_dim >= 32 && m.head_dim <= 256, "head_dim", m.head_dim,
       "even numbers from 32 to 256 (halves of a head rotate together)",
       "change hidden_size or num_attention_heads, or give head_dim");
  if (m.max_position_embeddings == 0) m.max_position_embeddings = sequence_length;
}

}  // namespace strata
