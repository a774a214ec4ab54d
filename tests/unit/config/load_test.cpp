#include "config/load.h"

#include <fmt/format.h>

#include <fstream>

#include "base/cpu.h"
#include "base/error.h"
#include "config/keys.h"
#include "config/presets.h"
#include "tests/support/catch.h"

using namespace strata;

namespace {

const std::string kSmall = R"("model": {"preset": "llama-5m"}, "data": {"train": "t"}, "run_dir": "r")";

Config read(const std::string& rest, const std::vector<std::string>& sets = {}) {
  return read_config("{" + kSmall + (rest.empty() ? "" : ", " + rest) + "}", "test.json", sets);
}

Config read_model(const std::string& model) {
  return read_config(
      R"({"data": {"train": "t", "sequence_length": 128}, "run_dir": "r", "model": )" + model + "}",
      "test.json");
}

template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "(nothing was refused)";
}

// What every refusal must say: the source, the pieces given, and what to do.
void check_says(const std::string& message, const std::vector<std::string>& pieces) {
  INFO(message);
  CHECK(message.find(" -> ") != std::string::npos);
  for (const std::string& piece : pieces) {
    INFO(piece);
    CHECK(message.find(piece) != std::string::npos);
  }
}

void refused(const std::string& rest, const std::vector<std::string>& pieces) {
  check_says(refusal([&] { read(rest); }), pieces);
}

const std::string kShape =
    R"("hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97)";

void model_refused(const std::string& rest, const std::vector<std::string>& pieces) {
  check_says(refusal([&] { read_model("{" + kShape + ", " + rest + "}"); }), pieces);
}

struct TemporaryFile {
  std::string path;
  TemporaryFile(const std::string& name, const std::string& text) : path("strata_test_" + name) {
    std::ofstream(path, std::ios::binary) << text;
  }
  ~TemporaryFile() { std::remove(path.c_str()); }
};

}  // namespace

TEST_CASE("defaults of a configuration are those of the struct") {
  Config expected;
  expected.model = find_preset("llama-5m")->model, expected.model_preset = "llama-5m";
  expected.data.train = {"t"}, expected.run_dir = "r";
  expected.federation.eta = 1.0;  // resolved by rule
  expected.precision = cpu_has_bf16_instructions() ? "bf16" : "fp32";
  CHECK(read("") == expected);
}

TEST_CASE("the layout of the design document is read") {
  const Config c = read_config(R"({
    "model": {"preset": "llama3.1-8b"},
    "data": {"train": ["a", "b"], "validation": "v", "sequence_length": 2048, "batch_size": 2},
    "mesh": {"federate": 16, "replicate": 8, "shard": 4},
    "federation": {"every": 8, "rule": "fedavg", "schedule": "blocking", "replicas": "one", "weights": "equal"},
    "precision": "bf16", "reduce_dtype": "fp32", "gradient_accumulation": 1, "gradient_clip": 1.0, "recompute": "none",
    "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "steps": 64, "warmup_steps": 6, "warmup_from_zero": false, "min_lr": 0.0},
    "evaluation": {"every": 8, "sequences": null}, "checkpoint": {"every": 100, "keep": 3},
    "device": "cpu", "seed": 42, "timeout_seconds": 300, "run_dir": "runs/llama8b" })",
                               "x.json");
  CHECK(c.model.hidden_size == 4096);
  CHECK(c.data.train == std::vector<std::string>{"a", "b"});
  CHECK(c.mesh.federate * c.mesh.replicate * c.mesh.shard == 512);
  CHECK(c.optimizer.beta2 == 0.95);
  CHECK(c.schedule.steps == 64);
  CHECK_FALSE(c.evaluation.sequences.has_value());
}

TEST_CASE("precision auto is resolved where a configuration is read") {
  const std::string here = cpu_has_bf16_instructions() ? "bf16" : "fp32";
  CHECK(read(R"("precision": "auto")").precision == here);
  CHECK(read(R"("precision": "auto", "device": "cuda")").precision == "bf16");
  CHECK(read(R"("precision": "fp32", "device": "cuda")").precision == "fp32");
  CHECK(write_config(read("")).find("auto") == std::string::npos);
}

TEST_CASE("the resolved configuration reads back to the same one, whatever the key") {
  std::vector<Config> configs = {
      read(""),
      read(
          R"("federation": {"rule": "diloco", "schedule": "streaming", "dtype": "int8"}, "seed": 9223372036854775807)"),
      read(
          R"("optimizer": {"lr": 0.1234567890123456789, "betas": [0, 0.999]}, "evaluation": {"sequences": 5})"),
      read_model("{" + kShape + R"(, "head_dim": 32, "rope_scaling": {"rope_type": "llama3", "factor": 2.5,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}})"),
  };
  for (const Config& c : configs) {
    const Config again = read_config(write_config(c), "resolved.json");
    CHECK(again == c);
    CHECK(write_config(again) == write_config(c));
  }
}

TEST_CASE("every key of the table can be set and is written") {
  const Config defaults =
      read("", {"federation.schedule=streaming", "federation.rule=diloco", "precision=bf16_pure",
                "reduce_dtype=bf16", "reduce_rounding=hop", "schedule.kind=wsd"});
  for (const Key& key : keys()) {
    if (key.names_model) continue;
    INFO(key.path);
    const Json value = key.write(defaults);
    Config other = defaults;
    REQUIRE(key.read(other, value));
    CHECK(other == defaults);
    // A value of no key's type.
    CHECK_FALSE(key.read(other, Json::array({Json::array()})));
    CHECK(other == defaults);
    CHECK_FALSE(key.doc.empty());
  }
}

TEST_CASE("values are overridden by --set, with or without quotes") {
  const Config c =
      read(R"("optimizer": {"lr": 1e-3})", {"optimizer.lr=2e-4", "mesh.shard=4", "data.train=[\"x\", \"y\"]",
                                            "run_dir=123", "model.preset=llama-10m", "data.validation=\"v\"",
                                            "data.ignore_token=7", "data.ignore_token=null"});
  CHECK(c.optimizer.lr == 2e-4);
  CHECK(c.mesh.shard == 4);
  CHECK(c.data.train == std::vector<std::string>{"x", "y"});
  CHECK(c.data.validation == std::vector<std::string>{"v"});
  CHECK(c.run_dir == "123");
  CHECK(c.model.hidden_size == 384);
  CHECK_FALSE(c.data.ignore_token.has_value());

  auto set = [](const std::string& text) { return refusal([&] { read("", {text}); }); };
  check_says(set("optimizer.rl=1"), {"optimizer.rl", "optimizer.lr"});
  check_says(set("optimizer.lr"), {"KEY=VALUE"});
  check_says(set("optimizer.lr=nan"), {"--set", "optimizer.lr=nan"});
  check_says(set("optimizer.lr=1e400"), {"1e400"});
  check_says(set("seed=9223372036854775808"), {"9223372036854775808", "2^63 - 1"});
  check_says(set("seed.x=1"), {"seed"});
  check_says(set(std::string("run_dir=\xff\xfe")), {"UTF-8"});
}

TEST_CASE("unknown keys are refused with the nearest known one") {
  refused(R"("optimiser": {"lr": 1})", {"test.json", "\"optimiser\"", "did you mean \"optimizer\""});
  refused(R"("optimizer": {"learning_rate": 1})", {"\"optimizer.learning_rate\""});
  refused(R"("optimizer": {"beta": [0.9, 0.9]})", {"did you mean \"optimizer.betas\""});
  refused(R"("lr": 1)", {"did you mean \"optimizer.lr\""});
  refused(R"("gradient_cliping": 1)", {"did you mean \"gradient_clip\""});
  refused(R"("optimizer.lr": 1)", {"\"optimizer.lr\""});
  refused(R"("": 1)", {"unknown key"});
  refused("\"" + std::string(5000, 'x') + "\": 1", {"unknown key", "config-reference"});
  check_says(refusal([] { read_model(R"({"preset": "llama-5m", "hiden_size": 64})"); }),
             {"did you mean \"model.hidden_size\""});
}

TEST_CASE("wrong types are refused with path, value and what is allowed") {
  refused(R"("optimizer": {"lr": "fast"})", {"optimizer.lr", "\"fast\"", "a string", "a number above 0"});
  refused(R"("optimizer": 3)", {"optimizer is 3", "an object"});
  refused(R"("seed": 1.5)", {"seed", "1.5", "an integer"});
  refused(R"("seed": 8.0)", {"seed", "8.0", "an integer"});
  refused(R"("seed": true)", {"seed", "true"});
  refused(R"("seed": null)", {"seed", "null"});
  refused(R"("federation": {"offload": 1})", {"federation.offload", "true | false"});
  refused(R"("optimizer": {"betas": [0.9]})", {"optimizer.betas", "[0.9]", "list of two"});
  refused(R"("optimizer": {"betas": [0.9, 1.0]})", {"optimizer.betas", "below 1"});
  refused(R"("device": "tpu")", {"device", "\"tpu\"", "cpu | cuda"});
  refused(R"("mesh": {"shard": "auto"})", {"mesh.shard", "\"auto\"", "not chosen automatically"});
  check_says(refusal([] { read_config("[1]", "x"); }), {"[1]", "an object"});
  check_says(refusal([] { read_config(R"({"model": 1})", "x"); }), {"model is 1"});
  check_says(refusal([] { read("", {"data.train=[]"}); }), {"data.train", "[]"});
  check_says(refusal([] { read("", {"data.train=[\"a\", 1]"}); }), {"data.train", "[\"a\",1]"});
  refused(R"("run_dir": "")", {"run_dir"});
  check_says(refusal([] { read("", {R"(run_dir="a\u0000b")"}); }), {"run_dir"});
}

TEST_CASE("impossible values are refused") {
  refused(R"("optimizer": {"lr": 0})", {"optimizer.lr", "above 0"});
  refused(R"("optimizer": {"lr": -1e-3})", {"optimizer.lr", "-0.001", "above 0"});
  refused(R"("optimizer": {"lr": NaN})", {"test.json", "line 1", "optimizer.lr"});
  refused(R"("optimizer": {"lr": 1e400})", {"optimizer.lr", "1e400"});
  refused(R"("seed": 9223372036854775808)", {"seed", "9223372036854775808", "2^63 - 1"});
  refused(R"("seed": 99999999999999999999999)", {"seed", "99999999999999999999999", "2^63 - 1"});
  refused(R"("seed": -99999999999999999999999)", {"seed", "-99999999999999999999999"});
  refused(R"("seed": -1)", {"seed", "-1", "from 0"});
  refused(R"("mesh": {"shard": 0})", {"mesh.shard", "from 1"});
  refused(R"("mesh": {"shard": -4})", {"mesh.shard", "-4"});
  refused(R"("gradient_clip": -1)", {"gradient_clip", "at least 0"});
  refused(R"("timeout_seconds": 0)", {"timeout_seconds", "above 0"});
  refused(R"("mesh": {"shard": 1000000, "federate": 1000000})", {"mesh", "2^31 ranks"});
  refused(R"("gradient_accumulation": 1000000000, "schedule": {"steps": 1000000000000})", {"schedule.steps"});
}

TEST_CASE("keys that contradict each other are refused") {
  refused(R"("schedule": {"steps": 5, "warmup_steps": 6})",
          {"schedule.warmup_steps", "6", "schedule.steps = 5"});
  refused(R"("schedule": {"steps": 5, "decay_steps": 2})", {"schedule.decay_steps", "cosine"});
  refused(R"("schedule": {"kind": "wsd", "steps": 5, "warmup_steps": 3, "decay_steps": 3})",
          {"schedule.decay_steps", "2"});
  refused(R"("schedule": {"min_lr": 1})", {"schedule.min_lr", "optimizer.lr"});
  refused(R"("optimizer": {"stochastic_rounding": true})", {"optimizer.stochastic_rounding", "bf16_pure"});
  refused(R"("reduce_rounding": "hop")", {"reduce_rounding", "reduce_dtype"});
  refused(R"("reduce_imitate_hops": 4)", {"reduce_imitate_hops", "hop"});
  refused(R"("device": "cuda", "stream_order": "deferred")", {"stream_order", "cuda"});
  refused(R"("federation": {"momentum": 0.9})", {"federation.momentum", "fedavg"});
  refused(R"("federation": {"alpha": 0.5})", {"federation.alpha", "streaming"});
  refused(R"("federation": {"schedule": "streaming", "every": 4, "tau": 4})", {"federation.tau", "below"});
  refused(R"("evaluation": {"every": 4})", {"evaluation.every", "data.validation"});
  refused(R"("data": {"train": "t", "sequence_length": 4096})", {"given twice", "data"});
  check_says(refusal([] { read("", {"data.sequence_length=4096"}); }),
             {"data.sequence_length", "max_position_embeddings = 2048"});
  check_says(refusal([] { read("", {"data.ignore_token=8192"}); }), {"data.ignore_token", "8192"});
  check_says(refusal([] { read("", {"data.batch_size=100000000"}); }), {"data.batch_size", "2^31"});
}

TEST_CASE("text that is not strict JSON is refused where it goes wrong") {
  auto text = [](const std::string& t) { return refusal([&] { read_config(t, "x.json"); }); };
  check_says(text(""), {"x.json", "line 1"});
  check_says(text("{" + kSmall + "} x"), {"x.json", "line 1"});
  check_says(text("{\n\"threads\": 1,\n\"seed\" 2}"), {"line 3", "seed"});
  check_says(text("{" + kSmall + R"(, "seed": 1, "seed": 2})"), {"seed", "twice"});
  check_says(text(R"({"optimizer": {"lr": 1, "lr": 2}})"), {"optimizer.lr", "twice"});
  check_says(text("{\"run_dir\": \"\xff\"}"), {"run_dir", "UTF-8"});
  check_says(text(std::string(100000, '[')), {"nested deeper"});
  std::string deep;
  for (int i = 0; i < 50000; ++i) deep += "{\"a\":";
  check_says(text(deep), {"nested deeper"});
  check_says(refusal([] { load_config("no/such/file.json"); }), {"no/such/file.json", "cannot open"});
  check_says(refusal([] { load_config("/"); }), {"/"});
  check_says(refusal([] { load_config("/dev/zero"); }), {"/dev/zero", "larger"});
}

TEST_CASE("keys without a default are asked for") {
  check_says(refusal([] { read_config(R"({"data": {"train": "t"}, "run_dir": "r"})", "x"); }),
             {"model is missing"});
  check_says(refusal([] { read_config(R"({"model": {"preset": "llama-5m"}, "run_dir": "r"})", "x"); }),
             {"data.train is missing"});
  check_says(
      refusal([] { read_config(R"({"model": {"preset": "llama-5m"}, "data": {"train": "t"}})", "x"); }),
      {"run_dir is missing"});
  check_says(refusal([] { read_model(R"({"hidden_size": 64})"); }), {"model.intermediate_size is missing"});
}

TEST_CASE("impossible model shapes are refused") {
  auto shape = [](const std::string& key, int value) {
    return refusal([&] { read_model(fmt::format(R"({{"preset": "llama-5m", "{}": {}}})", key, value)); });
  };
  check_says(shape("num_key_value_heads", 3), {"model.num_key_value_heads", "3", "num_attention_heads = 4"});
  check_says(shape("head_dim", 33), {"model.head_dim", "33", "even"});
  check_says(shape("head_dim", 0), {"model.head_dim", "from 32 to 256"});
  check_says(shape("head_dim", 512), {"model.head_dim", "from 32 to 256"});
  check_says(shape("hidden_size", 250), {"model.hidden_size", "250", "multiples of 8"});
  check_says(shape("intermediate_size", 701), {"model.intermediate_size", "multiples of 8"});
  check_says(shape("vocab_size", 0), {"model.vocab_size", "from 2"});
  check_says(shape("num_hidden_layers", -1), {"model.num_hidden_layers", "from 1"});
  check_says(
      refusal([] {
        read_model(R"({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 9,
                              "num_attention_heads": 3})");
      }),
      {"model.num_attention_heads", "3", "hidden_size = 64"});
  check_says(
      refusal([] {
        read_model(R"({"hidden_size": 264, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 9,
                              "num_attention_heads": 8})");
      }),
      {"model.head_dim", "33", "even"});
  check_says(
      refusal([] {
        read_model(R"({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 9,
                              "num_attention_heads": 4})");
      }),
      {"model.head_dim", "16", "from 32 to 256"});
  // Sizes that were left out follow from the others.
  const Config c = read_model("{" + kShape + "}");
  CHECK(c.model.num_key_value_heads == 4);
  CHECK(c.model.head_dim == 32);
  CHECK(c.model.max_position_embeddings == 128);
}

TEST_CASE("presets have the published sizes and take overrides") {
  auto parameters = [](const LlamaConfig& m) {
    const std::int64_t q = m.num_attention_heads * m.head_dim, kv = m.num_key_value_heads * m.head_dim;
    const std::int64_t layer = m.hidden_size * (2 * q + 2 * kv + 3 * m.intermediate_size + 2);
    return m.num_hidden_layers * layer + m.hidden_size * (m.vocab_size * (m.tie_word_embeddings ? 1 : 2) + 1);
  };
  CHECK(parameters(find_preset("llama3.1-8b")->model) == 8030261248);
  CHECK(parameters(find_preset("llama3.1-70b")->model) == 70553706496);
  CHECK(parameters(find_preset("llama3.2-1b")->model) == 1235814400);
  CHECK(parameters(find_preset("llama3.2-3b")->model) == 3212749824);
  CHECK(parameters(find_preset("llama-5m")->model) == Approx(5e6).epsilon(0.05));
  CHECK(parameters(find_preset("llama-10m")->model) == Approx(10e6).epsilon(0.05));
  CHECK(parameters(find_preset("llama-20m")->model) == Approx(20e6).epsilon(0.05));

  const Config tied = read_model(R"({"preset": "llama3.1-8b", "tie_word_embeddings": true})");
  CHECK(parameters(tied.model) == 7504924672);  // the paper's
  CHECK(read_model(R"({"preset": "llama3.1-8b", "rope_scaling": null})").model.rope_scaling == std::nullopt);
  const Config factor = read_model(R"({"preset": "llama3.1-8b", "rope_scaling": {"factor": 2}})");
  CHECK(factor.model.rope_scaling == RopeScaling{2, 1, 4, 8192});
  check_says(refusal([] { read_model(R"({"preset": "gpt2"})"); }), {"\"gpt2\"", "llama3.1-8b | "});
  check_says(refusal([] { read_model(R"({"preset": "llama-5m", "path": "x"})"); }), {"keep one"});
  for (const ModelPreset& preset : model_presets()) {
    INFO(preset.name);
    CHECK(read_model("{\"preset\": \"" + preset.name + "\"}").model == preset.model);
  }
}

TEST_CASE("a Hugging Face config.json is read, in the styles of transformers 4 and 5") {
  // The keys of Meta's published Llama 3.1 8B.
  const std::string v4 =
      R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008], "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
    "vocab_size": 128256})";
  const TemporaryFile four("v4.json", v4);
  CHECK(read_model("{\"path\": \"" + four.path + "\"}").model == find_preset("llama3.1-8b")->model);

  const TemporaryFile five("v5.json",
                           R"({"dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 500000.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"}, "vocab_size": 128256})");
  CHECK(read_model("{\"path\": \"" + five.path + "\"}").model == find_preset("llama3.1-8b")->model);
  CHECK(read_model("{\"path\": \"" + five.path + "\", \"num_hidden_layers\": 2}").model.num_hidden_layers ==
        2);
  // What was read from a file stands inline in the resolved configuration.
  CHECK(write_config(read_model("{\"path\": \"" + five.path + "\"}")).find(five.path) == std::string::npos);

  const TemporaryFile bare("bare.json",
                           R"({"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 1, "vocab_size": 97, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}})");
  const Config c = read_model("{\"path\": \"" + bare.path + "\"}");
  CHECK(c.model.rms_norm_eps == 1e-6);  // Hugging Face's default
  CHECK(c.model.max_position_embeddings == 2048);
  CHECK_FALSE(c.model.rope_scaling.has_value());

  const TemporaryFile odd("odd.json", "{" + kShape + R"(, "mystery_gate": true})");
  check_says(refusal([&] { read_model("{\"path\": \"" + odd.path + "\"}"); }), {odd.path, "mystery_gate"});
  const TemporaryFile list("list.json", "[]");
  check_says(refusal([&] { read_model("{\"path\": \"" + list.path + "\"}"); }), {list.path, "[]"});
  check_says(refusal([&] { read_model(R"({"path": "no_such.json"})"); }), {"no_such.json"});
}

TEST_CASE("models that differ from a Llama in their mathematics are refused") {
  CHECK(
      read_model("{" + kShape + R"(, "attention_bias": false, "sliding_window": null, "hidden_act": "silu"})")
          .model.hidden_size == 128);
  model_refused(R"("attention_bias": true)", {"model.attention_bias", "true", "bias"});
  model_refused(R"("mlp_bias": true)", {"model.mlp_bias"});
  model_refused(R"("hidden_act": "gelu")", {"model.hidden_act", "\"gelu\"", "silu"});
  model_refused(R"("sliding_window": 4096)", {"model.sliding_window", "4096"});
  model_refused(R"("pretraining_tp": 2)", {"model.pretraining_tp", "2"});
  model_refused(R"("attention_dropout": 0.1)", {"model.attention_dropout", "0.1"});
  model_refused(R"("model_type": "mistral")", {"model.model_type", "mistral"});
  model_refused(R"("partial_rotary_factor": 0.5)", {"model.partial_rotary_factor"});
  model_refused(R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5})",
                {"partial_rotary_factor"});
  model_refused(R"("quantization_config": {"bits": 4})", {"model.quantization_config"});
  for (const char* kind : {"linear", "dynamic", "yarn", "longrope"}) {
    model_refused(fmt::format(R"("rope_scaling": {{"rope_type": "{}", "factor": 2.0}})", kind),
                  {"model.rope_scaling", kind, "llama3"});
  }
  model_refused(R"("rope_scaling": {"type": "linear", "factor": 2.0})", {"model.rope_scaling", "linear"});
  model_refused(R"("rope_scaling": {"rope_type": "llama3", "factor": 2.0})", {"model.rope_scaling"});
  model_refused(
      R"("rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1,
                    "original_max_position_embeddings": 8192})",
      {"model.rope_scaling", "high > low"});
  model_refused(R"("rope_scaling": 3)", {"model.rope_scaling", "3"});
  model_refused(R"("rope_parameters": 3)", {"model.rope_parameters", "3"});
}
