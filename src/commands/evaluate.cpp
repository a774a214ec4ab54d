#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/hf_folder.h"
#include "commands/model.h"
#include "commands/ranks.h"
#include "data/dataset.h"
#include "model/llama.h"
#include "sharding/engine.h"
#include "train/backend_factory.h"
#include "train/evaluate.h"
#include "train/plan.h"

namespace strata {
namespace {

// A model to measure, and the configuration that it brings.
struct Subject {
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<ModelWeights> weights;
  Config config;
};

Subject open_subject(const EvaluateArguments& a) {
  Subject s;
  if (a.hf.empty() == a.checkpoint.path.empty())
    throw UsageError("which model? -> give --checkpoint FOLDER or --hf FOLDER");
  if (!a.hf.empty()) {
    s.weights = std::make_unique<HfFolder>(a.hf);
    s.config.precision = "fp32";
    s.config.data.sequence_length = std::min<std::int64_t>(s.weights->model().max_position_embeddings, 2048);
  } else {
    s.checkpoint = std::make_unique<Checkpoint>(open_checkpoint(a.checkpoint.path));
    s.weights = std::make_unique<CheckpointWeights>(*s.checkpoint, a.checkpoint.choice);
    s.config = s.checkpoint->config();
  }
  Config& c = s.config;
  c.model = s.weights->model();
  c.data.sequence_length = a.sequence_length.value_or(c.data.sequence_length);
  c.data.batch_size = a.batch_size.value_or(c.data.batch_size);
  if (a.ignore_token) c.data.ignore_token = a.ignore_token;
  c.precision = a.precision.value_or(c.precision);
  c.threads = a.threads;
  c.device = "cpu";
  c.stream_order = "eager";
  if (c.data.sequence_length > c.model.max_position_embeddings)
    throw UsageError(
        fmt::format("--sequence-length is {}; the model has positions for {} tokens -> shorten it",
                    c.data.sequence_length, c.model.max_position_embeddings));
  return s;
}

ExitCode evaluate(const EvaluateArguments& a, MpiSession& session) {
  Subject subject = open_subject(a);
  Config& config = subject.config;
  config.mesh = {1, 1, session.size()};
  Backend backend = make_backend(config, session);
  Device& device = *backend.device;
  const TokenDataset data(a.data, config.data.sequence_length, config.model.vocab_size);
  const SequenceReader reader(data, Sampler(data.sequences(), 0, Sampler::Order::in_order),
                              config.data.ignore_token);
  const MeshGroups groups = make_groups(*backend.world, Mesh(config.mesh));
  Stream& compute = device.create_stream("compute", Device::StreamKind::compute);
  Llama model(llama_setup(config), device, *backend.ops);
  EngineOptions options = EngineOptions::from(config);
  options.moments = false;
  ShardingEngine engine(model.units(), groups, device, *backend.ops, compute, options);
  load_weights(*subject.weights, engine, device, compute);
  const std::int64_t sequences = std::min(data.sequences(), a.sequences.value_or(data.sequences()));
  Evaluator evaluator(device, compute, model, engine, groups, reader, sequences);
  const EvaluationResult result = evaluator.run(subject.checkpoint ? subject.checkpoint->step() : 0, true);
  if (result.tokens == 0)
    throw DataError(fmt::format(
        "{}: every target of the {} sequences is the token to ignore ({}): there is no loss -> check "
        "--ignore-token and the shards",
        data.files().front().path(), sequences, config.data.ignore_token.value_or(-1)));
  if (backend.world->rank() == 0) {
    const double perplexity = std::exp(result.loss);
    const nlohmann::ordered_json line = {
        {"loss", result.loss},
        {"perplexity", std::isfinite(perplexity) ? nlohmann::ordered_json(perplexity) : nullptr},
        {"tokens", result.tokens},
        {"sequences", sequences}};
    fmt::print("{}\n", line.dump());
  }
  backend.world->barrier({Traffic::control, "end of the evaluation", 0});
  return ExitCode::done;
}

}  // namespace

ExitCode evaluate_command(const EvaluateArguments& a) {
  return run_on_ranks([&a](MpiSession& session) { return evaluate(a, session); });
}

}  // namespace strata
