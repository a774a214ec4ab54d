#include "config/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>

#include "config/model_config.h"
#include "config/presets.h"

namespace strata {
namespace {

using Type = Key::Type;

// ---- what one kind of key accepts

struct Range {
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool low_open = false, high_open = false;  // the end itself is not allowed
  bool holds(double x) const {
    return std::isfinite(x) && (low_open ? x > low : x >= low) && (high_open ? x < high : x <= high);
  }
  std::string text() const {
    std::string from = low_open ? fmt::format("above {:g}", low) : fmt::format("at least {:g}", low);
    if (!std::isfinite(high)) return from;
    return from + (high_open ? fmt::format(" and below {:g}", high) : fmt::format(" and at most {:g}", high));
  }
};
Range above(double low) {
  return {low, std::numeric_limits<double>::infinity(), true, false};
}
Range at_least(double low) {
  return {low, std::numeric_limits<double>::infinity(), false, false};
}
Range below_one() {
  return {0, 1, false, true};
}

std::string show_limit(std::int64_t x) {
  return x == std::numeric_limits<std::int64_t>::max() ? "2^63 - 1" : std::to_string(x);
}

bool valid_text(const std::string& s) {
  return !s.empty() && s.find('\0') == std::string::npos;
}

// A field is optional<T> when null stands for "not set".
template <class T>
struct Unwrap {
  using type = T;
  static constexpr bool nullable = false;
};
template <class T>
struct Unwrap<std::optional<T>> {
  using type = T;
  static constexpr bool nullable = true;
};

template <class Field>
Json to_json_or_null(const Field& field) {
  if constexpr (Unwrap<Field>::nullable) {
    return field ? Json(*field) : Json(nullptr);
  } else {
    return Json(field);
  }
}

// `get` returns the field of a Config (const or not); `convert` stores a JSON value or returns false.
template <class Get, class Convert>
Key make_key(std::string path, Type type, std::string allowed, std::string doc, Get get, Convert convert) {
  using Field = std::remove_reference_t<decltype(get(std::declval<Config&>()))>;
  Key key;
  key.path = std::move(path), key.type = type, key.allowed = std::move(allowed), key.doc = std::move(doc);
  key.nullable = Unwrap<Field>::nullable;
  key.read = [get, convert](Config& c, const Json& v) {
    Field& field = get(c);
    if constexpr (Unwrap<Field>::nullable) {
      if (v.is_null()) {
        field.reset();
        return true;
      }
    }
    typename Unwrap<Field>::type value{};
    if (!convert(v, value)) return false;
    field = value;
    return true;
  };
  key.write = [get](const Config& c) { return to_json_or_null(get(c)); };
  return key;
}

template <class Get>
Key integer(std::string path, Get get, std::int64_t low, std::int64_t high, std::string doc) {
  return make_key(std::move(path), Type::integer, fmt::format("from {} to {}", low, show_limit(high)),
                  std::move(doc), get, [low, high](const Json& v, auto& out) {
                    if (!v.is_number_integer()) return false;
                    const auto x = v.get<std::int64_t>();
                    if (x < low || x > high) return false;
                    out = static_cast<std::remove_reference_t<decltype(out)>>(x);
                    return true;
                  });
}

template <class Get>
Key number(std::string path, Get get, Range range, std::string doc) {
  return make_key(std::move(path), Type::number, range.text(), std::move(doc), get,
                  [range](const Json& v, double& out) {
                    if (!v.is_number() || !range.holds(v.get<double>())) return false;
                    out = v.get<double>();
                    return true;
                  });
}

template <class Get>
Key boolean(std::string path, Get get, std::string doc) {
  return make_key(std::move(path), Type::boolean, "true | false", std::move(doc), get,
                  [](const Json& v, bool& out) {
                    if (!v.is_boolean()) return false;
                    out = v.get<bool>();
                    return true;
                  });
}

template <class Get>
Key choice(std::string path, Get get, std::vector<std::string> choices, std::string doc) {
  const std::string allowed = fmt::format("{}", fmt::join(choices, " | "));
  return make_key(std::move(path), Type::string, allowed, std::move(doc), get,
                  [choices](const Json& v, std::string& out) {
                    if (!v.is_string()) return false;
                    if (std::find(choices.begin(), choices.end(), v.get<std::string>()) == choices.end()) {
                      return false;
                    }
                    out = v.get<std::string>();
                    return true;
                  });
}

// One string or a list of strings.
template <class Get>
Key strings(std::string path, Get get, bool may_be_empty, std::string doc) {
  std::string allowed =
      may_be_empty ? "a path, or a list of paths" : "a path, or a list of at least one path";
  return make_key(std::move(path), Type::strings, std::move(allowed), std::move(doc), get,
                  [may_be_empty](const Json& v, std::vector<std::string>& out) {
                    const Json list = v.is_array() ? v : Json::array({v});
                    for (const Json& item : list) {
                      if (!item.is_string() || !valid_text(item.get<std::string>())) return false;
                    }
                    if (list.empty() && !may_be_empty) return false;
                    out = list.get<std::vector<std::string>>();
                    return true;
                  });
}

template <class Get>
Key mesh_size(std::string path, Get get, std::string doc) {
  Key key = integer(std::move(path), get, 1, 1 << 20, std::move(doc));
  key.allowed += " (sizes are not chosen automatically)";
  return key;
}

Key betas() {
  Key key;
  key.path = "optimizer.betas", key.type = Type::list;
  key.allowed = "a list of two numbers, each at least 0 and below 1";
  key.doc = "decay of AdamW's first and second moment";
  key.read = [](Config& c, const Json& v) {
    if (!v.is_array() || v.size() != 2) return false;
    for (const Json& x : v) {
      if (!x.is_number() || !below_one().holds(x.get<double>())) return false;
    }
    c.optimizer.beta1 = v[0].get<double>(), c.optimizer.beta2 = v[1].get<double>();
    return true;
  };
  key.write = [](const Config& c) { return Json::array({c.optimizer.beta1, c.optimizer.beta2}); };
  return key;
}

Key rope_scaling() {
  Key key;
  key.path = "model.rope_scaling", key.type = Type::object, key.nullable = true;
  key.allowed =
      "null, or an object with rope_type \"llama3\" (or \"default\"), factor, low_freq_factor, "
      "high_freq_factor "
      "(high > low > 0, factor at least 1) and original_max_position_embeddings";
  key.doc = "stretching of the rotary frequencies, as Llama 3.1 does it";
  key.read = [](Config& c, const Json& v) { return read_rope_scaling(v, c.model.rope_scaling); };
  key.write = [](const Config& c) { return write_rope_scaling(c.model.rope_scaling); };
  return key;
}

Key required(Key key) {
  key.required = true;
  return key;
}
Key derived(Key key, std::string text) {
  key.derived_default = std::move(text);
  return key;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const ModelPreset& preset : model_presets()) names.push_back(preset.name);
  return names;
}

Key preset() {
  Key key = choice(
      "model.preset", [](auto& c) -> auto& { return c.model_preset; }, preset_names(),
      "a known model; keys beside it override its values");
  key.derived_default = "none", key.names_model = true;
  key.write = [](const Config& c) { return c.model_preset.empty() ? Json(nullptr) : Json(c.model_preset); };
  return key;
}

Key model_path() {
  Key key;
  key.path = "model.path", key.type = Type::string, key.allowed = "a Hugging Face config.json";
  key.doc = "takes the model from that file; keys beside it override its values";
  key.derived_default = "none", key.names_model = true;
  key.read = [](Config&, const Json&) { return true; };  // expand_model has read the file
  key.write = [](const Config&) { return Json(nullptr); };
  return key;
}

Key run_dir() {
  return make_key(
      "run_dir", Type::string, "a folder",
      "where metrics, log, checkpoints and the resolved configuration go",
      [](auto& c) -> auto& { return c.run_dir; },
      [](const Json& v, std::string& out) {
        if (!v.is_string() || !valid_text(v.get<std::string>())) return false;
        out = v.get<std::string>();
        return true;
      });
}

// Limits that keep every product of sizes far from 2^63 and every token id in an int32.
constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kInt = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kSteps = std::int64_t{1} << 40;

// How a Key reaches its value in a Config.
#define FIELD(member) ([](auto& c) -> auto& { return c.member; })

std::vector<Key> model_keys() {
  return {
      preset(),
      model_path(),
      required(integer("model.hidden_size", FIELD(model.hidden_size), 8, 1 << 20, "width; a multiple of 8")),
      required(integer("model.intermediate_size", FIELD(model.intermediate_size), 8, 1 << 20,
                       "width of the feed-forward layer; a multiple of 8")),
      required(
          integer("model.num_hidden_layers", FIELD(model.num_hidden_layers), 1, 1 << 14, "decoder layers")),
      required(
          integer("model.num_attention_heads", FIELD(model.num_attention_heads), 1, 1 << 16, "query heads")),
      derived(integer("model.num_key_value_heads", FIELD(model.num_key_value_heads), 1, 1 << 16,
                      "key and value heads; divides num_attention_heads"),
              "num_attention_heads"),
      derived(integer("model.head_dim", FIELD(model.head_dim), 32, 256, "size of a head; even"),
              "hidden_size / num_attention_heads"),
      required(integer("model.vocab_size", FIELD(model.vocab_size), 2, 1 << 24, "token ids are below it")),
      derived(integer("model.max_position_embeddings", FIELD(model.max_position_embeddings), 1, kInt,
                      "longest sequence the model is meant for"),
              "data.sequence_length"),
      number("model.rope_theta", FIELD(model.rope_theta), above(0), "base of the rotary frequencies"),
      rope_scaling(),
      number("model.rms_norm_eps", FIELD(model.rms_norm_eps), above(0),
             "added to the mean square in RMSNorm"),
      number("model.initializer_range", FIELD(model.initializer_range), above(0),
             "standard deviation of the initial weights"),
      boolean("model.tie_word_embeddings", FIELD(model.tie_word_embeddings),
              "one matrix for embedding and output"),
  };
}

std::vector<Key> data_and_mesh_keys() {
  return {
      required(strings("data.train", FIELD(data.train), false,
                       "training tokens: shard files, prefixes (without .bin/.idx) or folders of them")),
      strings("data.validation", FIELD(data.validation), true,
              "validation tokens, likewise; without them nothing is evaluated"),
      integer("data.sequence_length", FIELD(data.sequence_length), 1, 1 << 30, "tokens in a sequence"),
      integer("data.batch_size", FIELD(data.batch_size), 1, 1 << 30, "sequences a rank and micro-step"),
      choice("data.groups", FIELD(data.groups), {"disjoint", "identical"},
             "identical: every federation group reads the same sequences (tests and studies)"),
      integer("data.ignore_token", FIELD(data.ignore_token), 0, kInt - 1,
              "targets equal to this id do not count in the loss"),
      mesh_size("mesh.federate", FIELD(mesh.federate), "F: federation groups"),
      mesh_size("mesh.replicate", FIELD(mesh.replicate), "R: replicas in a federation group"),
      mesh_size("mesh.shard", FIELD(mesh.shard), "S: shards of a replica"),
  };
}

std::vector<Key> federation_keys() {
  return {
      integer("federation.every", FIELD(federation.every), 1, kSteps, "A: steps between aggregations"),
      choice("federation.rule", FIELD(federation.rule), {"fedavg", "fedavgm", "fedmom", "diloco"},
             "how the groups' models become one"),
      choice("federation.schedule", FIELD(federation.schedule), {"blocking", "overlap", "streaming"},
             "blocking: before the next step; overlap: the same result, hidden behind the next forward; "
             "streaming: "
             "units spread over the A steps"),
      choice("federation.replicas", FIELD(federation.replicas), {"all", "one"},
             "which replicas aggregate: all in parallel, or one that then broadcasts"),
      choice("federation.weights", FIELD(federation.weights), {"equal", "tokens"},
             "weights of the groups in the mean"),
      derived(number("federation.eta", FIELD(federation.eta), above(0), "outer learning rate"),
              "fedavg and fedavgm 1, fedmom and diloco 0.7 (streaming 0.4)"),
      derived(number("federation.momentum", FIELD(federation.momentum), below_one(),
                     "outer momentum; not for fedavg"),
              "0.9"),
      derived(number("federation.alpha", FIELD(federation.alpha), Range{0, 1, false, false},
                     "share of the local weights kept when a fragment arrives; streaming only"),
              "0.5"),
      integer("federation.tau", FIELD(federation.tau), 1, kSteps,
              "steps from sending a fragment to applying it; streaming only"),
      integer("federation.fragment_layers", FIELD(federation.fragment_layers), 1, 1 << 14,
              "decoder layers in a fragment; streaming only"),
      choice("federation.dtype", FIELD(federation.dtype), {"fp32", "bf16", "int8"},
             "of aggregated values on the wire"),
      boolean("federation.offload", FIELD(federation.offload), "keep the outer state in host memory"),
  };
}

std::vector<Key> optimizer_keys() {
  return {
      choice("optimizer.kind", FIELD(optimizer.kind), {"adamw", "sgd"}, "the inner optimizer"),
      number("optimizer.lr", FIELD(optimizer.lr), above(0), "peak learning rate"),
      betas(),
      number("optimizer.eps", FIELD(optimizer.eps), above(0), "added to the root of AdamW's second moment"),
      number("optimizer.weight_decay", FIELD(optimizer.weight_decay), at_least(0), "decoupled weight decay"),
      boolean("optimizer.decay_norms", FIELD(optimizer.decay_norms), "decay norm weights too"),
      boolean("optimizer.stochastic_rounding", FIELD(optimizer.stochastic_rounding),
              "round updated weights stochastically; precision bf16_pure only"),
      choice("schedule.kind", FIELD(schedule.kind), {"cosine", "linear", "constant", "wsd"},
             "learning rate after the warm-up; wsd: constant, then linear decay"),
      integer("schedule.steps", FIELD(schedule.steps), 1, kSteps, "optimizer steps of the whole run"),
      integer("schedule.warmup_steps", FIELD(schedule.warmup_steps), 0, kSteps, "steps of linear warm-up"),
      integer("schedule.decay_steps", FIELD(schedule.decay_steps), 0, kSteps, "final decay; wsd only"),
      boolean("schedule.warmup_from_zero", FIELD(schedule.warmup_from_zero),
              "true: the first step has learning rate 0"),
      number("schedule.min_lr", FIELD(schedule.min_lr), at_least(0), "learning rate at the end of the decay"),
  };
}

std::vector<Key> run_keys() {
  return {
      integer("evaluation.every", FIELD(evaluation.every), 0, kSteps,
              "steps between evaluations; 0: only after the last step"),
      integer("evaluation.sequences", FIELD(evaluation.sequences), 1, kAny,
              "validation sequences in all, over all ranks; null: all there are"),
      integer("checkpoint.every", FIELD(checkpoint.every), 0, kSteps,
              "steps between checkpoints; 0: only at the end and when stopped"),
      integer("checkpoint.keep", FIELD(checkpoint.keep), 1, 1 << 20, "checkpoints kept"),
      choice("precision", FIELD(precision), {"auto", "fp32", "bf16", "bf16_pure"},
             "bf16: computes in bf16, keeps fp32 weights and moments; bf16_pure: everything bf16; auto: bf16 "
             "on GPUs and on CPUs with instructions for it, else fp32"),
      choice("reduce_dtype", FIELD(reduce_dtype), {"fp32", "bf16"}, "of gradients on the wire"),
      choice("reduce_rounding", FIELD(reduce_rounding), {"once", "hop"},
             "hop: partial sums are rounded to the wire's dtype at every hop, as a ring does"),
      integer("reduce_imitate_hops", FIELD(reduce_imitate_hops), 0, 1 << 20,
              "with reduce_rounding hop: roundings of a ring of this many ranks; 0: of the group's own size"),
      integer("gradient_accumulation", FIELD(gradient_accumulation), 1, 1 << 30, "K: micro-steps in a step"),
      choice("accumulate", FIELD(accumulate), {"shard", "full"},
             "shard: reduce each micro-step; full: keep full gradients, reduce once"),
      number("gradient_clip", FIELD(gradient_clip), at_least(0),
             "largest global gradient norm; 0: no clipping"),
      choice("recompute", FIELD(recompute), {"none", "selective", "full"},
             "activations computed again in backward instead of kept"),
      boolean("reshard_after_forward", FIELD(reshard_after_forward),
              "false: keep gathered weights from forward to backward"),
      integer("prefetch", FIELD(prefetch), 0, 64, "units gathered ahead"),
      choice("device", FIELD(device), {"cpu", "cuda"}, "where it runs"),
      integer("threads", FIELD(threads), 1, 1024, "CPU threads a rank"),
      choice("stream_order", FIELD(stream_order), {"eager", "deferred"},
             "deferred: streams run in a seeded legal order (tests; cpu only)"),
      integer("seed", FIELD(seed), 0, kAny, "of initial weights, data order and stochastic rounding"),
      number("peak_tflops", FIELD(peak_tflops), above(0),
             "dense peak of one rank at the run's precision, in TFLOP/s, for MFU; unset: MFU is n/a"),
      number("timeout_seconds", FIELD(timeout_seconds), above(0),
             "longest wait for another rank before the job is ended"),
      required(run_dir()),
  };
}

#undef FIELD

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string_view last_part(std::string_view path) {
  return path.substr(path.rfind('.') + 1);
}

const char* type_name(Type type) {
  switch (type) {
    case Type::integer:
      return "integer";
    case Type::number:
      return "number";
    case Type::boolean:
      return "boolean";
    case Type::string:
      return "string";
    case Type::strings:
      return "string or list";
    case Type::list:
      return "list";
    case Type::object:
      return "object";
  }
  return "?";
}

}  // namespace

const std::vector<Key>& keys() {
  static const std::vector<Key> table = [] {
    std::vector<Key> all;
    for (auto part : {model_keys, data_and_mesh_keys, federation_keys, optimizer_keys, run_keys}) {
      for (Key& key : part()) all.push_back(std::move(key));
    }
    return all;
  }();
  return table;
}

const Key* find_key(std::string_view path) {
  for (const Key& key : keys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

bool is_section(std::string_view path) {
  return std::any_of(keys().begin(), keys().end(), [path](const Key& key) {
    return key.path.size() > path.size() && key.path.starts_with(path) && key.path[path.size()] == '.';
  });
}

std::string nearest_key(std::string_view path) {
  constexpr std::size_t kLongest = 64;  // longer than every key: nothing can be near
  if (path.size() > kLongest) return {};
  std::size_t smallest = (std::max<std::size_t>(2, last_part(path).size() / 2) + 1) * 2;
  std::string winner;
  // The last part alone may match, a "lr" in the wrong section; a match of the whole path wins a tie.
  auto score = [&](const std::string& known) {
    const std::size_t whole = edit_distance(path, known) * 2;
    const std::size_t leaf = edit_distance(last_part(path), last_part(known)) * 2 + 1;
    if (const std::size_t d = std::min(whole, leaf); d < smallest) winner = known, smallest = d;
  };
  for (const Key& key : keys()) {
    score(key.path);
    if (const auto dot = key.path.rfind('.'); dot != std::string::npos) score(key.path.substr(0, dot));
  }
  return winner;
}

std::string describe_allowed(const Key& key) {
  std::string text;
  switch (key.type) {
    case Type::integer:
      text = "an integer " + key.allowed;
      break;
    case Type::number:
      text = "a number " + key.allowed;
      break;
    default:
      text = key.allowed;
  }
  return key.nullable && !text.starts_with("null") ? text + ", or null" : text;
}

std::string config_reference() {
  const Config defaults;
  std::string out = "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n";
  auto cell = [](const std::string& text) {  // a bar would end the cell
    std::string escaped;
    for (char c : text) {
      if (c == '|') escaped += '\\';
      escaped += c;
    }
    return escaped;
  };
  for (const Key& key : keys()) {
    const std::string value = key.required                  ? "required"
                              : key.derived_default.empty() ? fmt::format("`{}`", key.write(defaults).dump())
                                                            : key.derived_default;
    out += fmt::format("| `{}` | {} | {} | {} | {} |\n", key.path, type_name(key.type), cell(value),
                       cell(key.allowed), cell(key.doc));
  }
  return out;
}

}  // namespace strata
