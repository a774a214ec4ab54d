#pragma once
// The validated configuration. Every default stands here and nowhere else; docs, help and parser come from
// the table in config/keys.cpp.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace strata {

struct RopeScaling {  // rope_type "llama3"; other kinds are refused
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  std::int64_t original_max_position_embeddings = 8192;
  bool operator==(const RopeScaling&) const = default;
};

struct LlamaConfig {  // Hugging Face's key names
  std::int64_t hidden_size = 0, intermediate_size = 0, num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
  std::int64_t vocab_size = 0, max_position_embeddings = 0;
  double rope_theta = 10000, rms_norm_eps = 1e-5, initializer_range = 0.02;
  std::optional<RopeScaling> rope_scaling;
  bool tie_word_embeddings = false;
  bool operator==(const LlamaConfig&) const = default;
};

struct DataConfig {
  std::vector<std::string> train, validation;           // shard files, prefixes or folders
  std::int64_t sequence_length = 1024, batch_size = 1;  // batch_size: sequences a rank and micro-step
  std::string groups = "disjoint";                      // disjoint | identical
  std::optional<std::int64_t> ignore_token;             // targets equal to this id are masked out of the loss
  bool operator==(const DataConfig&) const = default;
};

struct MeshConfig {
  int federate = 1, replicate = 1, shard = 1;
  bool operator==(const MeshConfig&) const = default;
};

struct FederationConfig {
  std::int64_t every = 8;                      // A, steps between aggregations
  std::string rule = "fedavg";                 // fedavg | fedavgm | fedmom | diloco
  std::string schedule = "blocking";           // blocking | overlap | streaming
  std::string replicas = "all";                // all | one
  std::string weights = "equal";               // equal | tokens
  std::optional<double> eta, momentum, alpha;  // default by rule
  std::int64_t tau = 1, fragment_layers = 3;   // streaming: delay in steps; layers a fragment
  std::string dtype = "fp32";                  // fp32 | bf16 | int8 on the wire
  bool offload = false;
  bool operator==(const FederationConfig&) const = default;
};

struct OptimizerConfig {
  std::string kind = "adamw";  // adamw | sgd
  double lr = 3e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  bool decay_norms = false;
  bool stochastic_rounding = false;  // bf16_pure only
  bool operator==(const OptimizerConfig&) const = default;
};

struct ScheduleConfig {
  std::string kind = "cosine";                                   // cosine | linear | constant | wsd
  std::int64_t steps = 1000, warmup_steps = 0, decay_steps = 0;  // decay_steps: wsd only
  bool warmup_from_zero = false;  // true: step 1 has lr 0, as the paper's artifact
  double min_lr = 0;
  bool operator==(const ScheduleConfig&) const = default;
};

struct EvaluationConfig {
  std::int64_t every = 0;                 // 0: only at the end
  std::optional<std::int64_t> sequences;  // global count; default all
  bool operator==(const EvaluationConfig&) const = default;
};

struct CheckpointConfig {
  std::int64_t every = 0, keep = 3;  // every 0: only at the end and when stopped
  bool operator==(const CheckpointConfig&) const = default;
};

struct Config {
  LlamaConfig model;
  std::string model_preset;  // "" unless the model was given as a preset; for messages
  DataConfig data;
  MeshConfig mesh;
  FederationConfig federation;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  EvaluationConfig evaluation;
  CheckpointConfig checkpoint;
  std::string precision = "auto";        // fp32 | bf16 | bf16_pure once read; auto is resolved by read_config
  std::string reduce_dtype = "fp32";     // fp32 | bf16: gradients on the wire
  std::string reduce_rounding = "once";  // once | hop
  int reduce_imitate_hops = 0;
  std::int64_t gradient_accumulation = 1;
  std::string accumulate = "shard";  // shard | full
  double gradient_clip = 1.0;        // 0: none
  std::string recompute = "none";    // none | selective | full
  bool reshard_after_forward = true;
  int prefetch = 1;  // units gathered ahead
  std::string device = "cpu";
  int threads = 1;                     // CPU threads a rank
  std::string stream_order = "eager";  // eager | deferred (CPU only: seeded legal order, for tests)
  std::uint64_t seed = 42;
  std::optional<double> peak_tflops;  // dense peak of a rank at its precision, for MFU
  double timeout_seconds = 300;
  std::string run_dir;
  bool operator==(const Config&) const = default;
};

}  // namespace strata
