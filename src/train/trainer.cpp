#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "data/dataset.h"
#include "federation/scheduler.h"
#include "model/llama.h"
#include "model/parameter_table.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"
#include "train/backend_factory.h"
#include "train/batches.h"
#include "train/control.h"
#include "train/evaluate.h"
#include "train/flops.h"
#include "train/metrics.h"
#include "train/plan.h"
#include "train/progress.h"
#include "train/resume.h"
#include "train/run_folder.h"
#include "train/signals.h"
#include "train/status.h"
#include "train/step_timer.h"

namespace strata {
namespace {

StepBytes received(const MeshGroups& groups) {
  auto of = [](const Communicator& c, Collective kind) {
    const ByteCounters counters = c.counters();
    return counters.at(Traffic::training, kind).received + counters.at(Traffic::edge, kind).received;
  };
  StepBytes b;
  b.shard_all_gather = of(*groups.shard, Collective::all_gather);
  b.shard_reduce_scatter = of(*groups.shard, Collective::reduce_scatter);
  b.replicate_all_reduce = of(*groups.replicate, Collective::all_reduce);
  b.replicate_broadcast = of(*groups.replicate, Collective::broadcast);
  b.federate_all_reduce =
      of(*groups.federate, Collective::all_reduce) + of(*groups.federate, Collective::all_gather);
  return b;
}

StepBytes operator-(const StepBytes& a, const StepBytes& b) {
  return {a.shard_all_gather - b.shard_all_gather, a.shard_reduce_scatter - b.shard_reduce_scatter,
          a.replicate_all_reduce - b.replicate_all_reduce, a.replicate_broadcast - b.replicate_broadcast,
          a.federate_all_reduce - b.federate_all_reduce};
}

// The counts of a step's bytes as a checkpoint keeps them: those that no line of the metrics has shown yet.
std::map<std::string, std::int64_t> to_counters(const StepBytes& b) {
  return {{"bytes.shard.all_gather", b.shard_all_gather},
          {"bytes.shard.reduce_scatter", b.shard_reduce_scatter},
          {"bytes.replicate.all_reduce", b.replicate_all_reduce},
          {"bytes.replicate.broadcast", b.replicate_broadcast},
          {"bytes.federate.all_reduce", b.federate_all_reduce}};
}

StepBytes from_counters(std::map<std::string, std::int64_t> c) {
  return {c["bytes.shard.all_gather"], c["bytes.shard.reduce_scatter"], c["bytes.replicate.all_reduce"],
          c["bytes.replicate.broadcast"], c["bytes.federate.all_reduce"]};
}

class Trainer {
 public:
  Trainer(const TrainOptions& options, Backend& backend, const RunFolder& folder, StatusRecord& status,
          const StopSignals& signals);
  // An error leaves work in flight that uses what is about to be destroyed. What that work throws is no news.
  ~Trainer() {
    try {
      device_.synchronize();
    } catch (...) {
    }
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;
  ExitCode run();
  std::int64_t steps_taken() const { return step_; }

 private:
  // A step whose numbers are still on their way to the host.
  struct PendingStep {
    std::int64_t step = 0;
    double lr = 0;
    StepEvents events;
    StepBytes bytes;
  };

  void step(std::int64_t t);
  void conclude();
  void drain() {
    if (control_.pending()) conclude();
  }
  void validate(std::int64_t t);
  void resume(const RunFolder& folder, const std::string& from);
  void save();

  const Config& config_;
  TrainingObserver* observer_;
  StatusRecord& status_;
  const StopSignals& signals_;
  Device& device_;
  World& world_;
  MeshGroups groups_;
  Stream& compute_;
  Llama model_;
  ShardingEngine engine_;
  Optimizer optimizer_;
  FederationScheduler federation_;
  TokenDataset train_data_;
  SequenceReader train_reader_;
  std::optional<TokenDataset> validation_data_;
  std::optional<SequenceReader> validation_reader_;
  Batches batches_;
  std::optional<Evaluator> evaluator_;
  CheckpointSaver saver_;
  ControlPlane control_;
  MetricsWriter metrics_;
  Progress progress_;

  Buffer reports_;    // RankReport of the present and of the last step
  Buffer stop_host_;  // int32 each
  PendingStep pending_;
  StepBytes counted_;
  std::vector<FederationScheduler::BusySpan> busy_;  // aggregations whose time no line has shown yet
  Event step_end_;
  std::int64_t step_ = 0, saved_step_ = 0;  // last one taken, last one saved
  std::int64_t sequences_consumed_ = 0;     // position in the global order
  std::int64_t tokens_ = 0;                 // target tokens the world has trained on
  bool stop_agreed_ = false;
  std::optional<EvaluationResult> last_validation_;
};

Trainer::Trainer(const TrainOptions& options, Backend& backend, const RunFolder& folder, StatusRecord& status,
                 const StopSignals& signals)
    : config_(options.config),
      observer_(options.observer),
      status_(status),
      signals_(signals),
      device_(*backend.device),
      world_(*backend.world),
      groups_(make_groups(world_, Mesh(config_.mesh))),
      compute_(device_.create_stream("compute", Device::StreamKind::compute)),
      model_(llama_setup(config_), device_, *backend.ops),
      engine_(model_.units(), groups_, device_, *backend.ops, compute_, EngineOptions::from(config_)),
      optimizer_(engine_, groups_, device_, *backend.ops, compute_, OptimizerOptions::from(config_)),
      federation_(engine_, groups_, device_, *backend.ops, compute_, FederationOptions::from(config_)),
      train_data_(config_.data.train, config_.data.sequence_length, config_.model.vocab_size),
      train_reader_(train_data_, Sampler(train_data_.sequences(), config_.seed), config_.data.ignore_token),
      batches_(device_, train_reader_, batch_shape(config_, groups_.mesh, groups_.position)),
      saver_(world_, groups_, device_, compute_, engine_, federation_, folder.checkpoints(),
             config_.checkpoint.keep),
      control_(device_, *groups_.world),
      progress_(world_.rank() == 0) {
  reports_ = device_.allocate(2 * sizeof(RankReport), Purpose::data);
  stop_host_ = device_.allocate_host(2 * sizeof(std::int32_t), Purpose::data);
  if (!config_.data.validation.empty()) {
    validation_data_.emplace(config_.data.validation, config_.data.sequence_length, config_.model.vocab_size);
    const std::int64_t all = validation_data_->sequences();
    validation_reader_.emplace(*validation_data_, Sampler(all, 0, Sampler::Order::in_order),
                               config_.data.ignore_token);
    evaluator_.emplace(device_, compute_, model_, engine_, groups_, *validation_reader_,
                       std::min(all, config_.evaluation.sequences.value_or(all)));
  }
  engine_.initialize(config_.seed);
  federation_.initialize();
  if (!options.resume.empty()) resume(folder, options.resume);
  if (world_.rank() != 0) return;
  write_resolved_config(folder, config_);
  metrics_ = MetricsWriter(folder.metrics(), step_);
}

void Trainer::resume(const RunFolder& folder, const std::string& from) {
  const auto load = [this](const std::filesystem::path& path, const CheckpointManifest& manifest) {
    if (manifest.data_sequences != train_data_.sequences())
      throw UsageError(fmt::format(
          "data.train holds {} sequences, the run of the checkpoint {} had {}: the global order would be "
          "another -> give the same token shards",
          train_data_.sequences(), path.string(), manifest.data_sequences));
    const auto notes = restore(Checkpoint(path, manifest), groups_, device_, compute_, engine_, federation_);
    if (world_.rank() != 0) return;
    for (const std::string& note : notes) log_warning("resuming: {}", note);
  };
  const auto manifest = resume_run(world_, folder, from, config_, load);
  if (!manifest) return;
  step_ = saved_step_ = manifest->step;
  sequences_consumed_ = manifest->sequences_consumed;
  tokens_ = manifest->tokens;
  // The next line of the metrics also shows what was moved since the last one.
  if (manifest->config.mesh == config_.mesh) counted_ = received(groups_) - from_counters(manifest->counters);
  if (step_ >= config_.schedule.steps)
    log_info("the run has taken {} of {} steps: nothing is left to do", step_, config_.schedule.steps);
}

ExitCode Trainer::run() {
  const std::int64_t steps = config_.schedule.steps;
  log_info("mesh {}; {} parameters; {} sequences of {} tokens an epoch", groups_.mesh.describe(),
           parameter_count(engine_.units()), train_data_.sequences(), config_.data.sequence_length);
  if (observer_ != nullptr) observer_->initialized(engine_, groups_);
  step_end_ = device_.record(compute_);
  const auto due = [](std::int64_t t, std::int64_t every) { return every > 0 && t % every == 0; };
  // With nobody to agree with, a signal needs no report to count.
  const bool alone = world_.size() == 1;
  while (step_ < steps && !stop_agreed_ && !(alone && signals_.received())) {
    const std::int64_t t = step_ + 1;
    step(t);
    step_ = t;
    if (evaluator_ && (due(t, config_.evaluation.every) || t == steps)) validate(t);
    if (due(t, config_.checkpoint.every)) save();
  }
  drain();
  federation_.finish();
  device_.synchronize();
  if (observer_ != nullptr) observer_->finished(engine_, groups_);
  if (saved_step_ != step_) save();
  progress_.finish();
  if (step_ < steps)
    log_info("stopped by a signal after step {} of {} -> continue with --resume auto", step_, steps);
  return step_ < steps ? ExitCode::stopped : ExitCode::done;
}

void Trainer::step(std::int64_t t) {
  auto* report = reports_.as<RankReport>() + t % 2;
  auto* stop = stop_host_.as<std::int32_t>() + t % 2;
  PendingStep now;
  now.step = t;
  now.lr = learning_rate(config_.schedule, config_.optimizer.lr, t);
  now.events.begin = step_end_;

  status_.enter(RunPhase::data, t);
  const StepBatch batch = batches_.next(compute_, sequences_consumed_);
  federation_.count_tokens(t, batch.host_target_tokens);
  device_.fill_zero(compute_, report, sizeof(RankReport));
  now.events.data = device_.record(compute_);

  status_.enter(RunPhase::compute);
  engine_.begin_step(t);
  for (std::size_t k = 0; k < batch.tokens.size(); ++k) {
    engine_.begin_micro_step(static_cast<int>(k));
    model_.forward_backward(compute_, engine_, batch.tokens[k], batch.targets[k], &report->loss_sum,
                            &now.events.forward.emplace_back());
    if (k + 1 == batch.tokens.size()) engine_.finish_gradients();
    now.events.backward.push_back(device_.record(compute_));
  }
  if (observer_ != nullptr) observer_->reduced(t, engine_);
  status_.enter(RunPhase::optimizer);
  optimizer_.step(t, now.lr, batch.target_tokens);
  now.events.optimizer = device_.record(compute_);
  status_.enter(RunPhase::aggregation);
  now.events.aggregated = federation_.after_step(t);
  if (t == config_.schedule.steps) federation_.finish();  // its time and bytes are this step's
  now.events.aggregation = step_end_ = device_.record(compute_);
  sequences_consumed_ += batch_shape(config_, groups_.mesh, groups_.position).sequences_per_step();

  for (const auto& span : federation_.take_busy_spans()) busy_.push_back(span);

  const StepBytes counted = received(groups_);
  now.bytes = counted - counted_;
  counted_ = counted;

  *stop = signals_.received() ? 1 : 0;
  device_.copy(compute_, &report->tokens, batch.target_tokens, sizeof(double));
  device_.copy(compute_, &report->scale, optimizer_.scale(), sizeof(StepScale));
  device_.copy_to_device(compute_, &report->stop, stop, sizeof(std::int32_t));
  status_.enter(RunPhase::control);
  drain();  // the step before this one
  control_.start(compute_, t, report);
  pending_ = std::move(now);
}

void Trainer::conclude() {
  const WorldStep world = control_.finish();
  const PendingStep& p = pending_;
  // Its gradient was taken as zero. What that did to the weights goes with the run: a save comes here first.
  if (world.tokens == 0) {
    const std::int64_t sequences = batch_shape(config_, groups_.mesh, groups_.position).sequences_per_step();
    throw DataError(fmt::format(
        "step {}: all {} targets of its {} sequences are data.ignore_token ({}): there is nothing to learn "
        "from -> check that token and the shards, or take more sequences into a step",
        p.step, sequences * config_.data.sequence_length, sequences, config_.data.ignore_token.value_or(-1)));
  }
  if (!world.non_finite_ranks.empty()) {
    throw NonFiniteError(
        fmt::format("loss or gradient norm is not finite at step {} on {} rank(s), the first being rank {}; "
                    "the weights were not "
                    "touched -> lower optimizer.lr, or resume from the last checkpoint",
                    p.step, world.non_finite_ranks.size(), world.non_finite_ranks.front()));
  }
  stop_agreed_ |= world.stop_requested;
  tokens_ += world.tokens;

  TrainRecord r;
  r.step = p.step;
  r.loss = world.loss;
  r.perplexity_rank_mean = world.perplexity_rank_mean;
  r.lr = p.lr;
  r.grad_norm = world.grad_norm_mean;
  r.grad_norm_max = world.grad_norm_max;
  r.tokens = tokens_;
  r.time = phase_seconds(device_, p.events);
  r.tokens_per_second = static_cast<double>(world.tokens) / std::max(r.time.total, 1e-9);
  r.mfu = model_flops_utilization(config_, r.tokens_per_second / world_.size());
  r.bytes = p.bytes;
  r.aggregated = p.events.aggregated;
  r.aggregation_busy = busy_seconds(device_, busy_);
  r.memory_peak_bytes = device_.memory().total_peak;
  metrics_.write(r);
  progress_.show(
      {p.step, config_.schedule.steps, r.loss, r.lr, r.grad_norm, r.tokens_per_second, r.mfu, r.time.total});
}

void Trainer::save() {
  drain();
  status_.enter(RunPhase::checkpoint);
  const auto began = std::chrono::steady_clock::now();
  federation_.finish();
  device_.synchronize();
  metrics_.sync();

  CheckpointManifest state;
  state.step = step_;
  state.sequences_consumed = sequences_consumed_;
  state.tokens = tokens_;
  state.data_sequences = train_data_.sequences();
  state.aggregated = federation_.aggregates(step_);
  state.config = config_;
  state.counters = to_counters(received(groups_) - counted_);
  const std::filesystem::path path = saver_.save(std::move(state));
  saved_step_ = step_;
  progress_.finish();
  log_info("step {}: checkpoint {} ({:.1f} s)", step_, path.string(),
           std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  step_end_ = device_.record(compute_);
}

void Trainer::validate(std::int64_t t) {
  drain();
  status_.enter(RunPhase::evaluation);
  federation_.finish();
  last_validation_ = evaluator_->run(t, groups_.mesh.federate() == 1 || federation_.aggregates(t));
  const EvaluationResult& v = *last_validation_;
  metrics_.write(ValidationRecord{t, v.loss, v.loss_spread, v.tokens, v.seconds});
  progress_.finish();
  if (v.tokens == 0) {
    if (world_.rank() == 0)
      log_warning(
          "step {}: every target of the validation sequences is data.ignore_token ({}): there is no loss", t,
          config_.data.ignore_token.value_or(-1));
    step_end_ = device_.record(compute_);
    return;
  }
  log_info("step {}: validation loss {:.4f}, perplexity {:.2f}{} ({} tokens, {:.1f} s)", t, v.loss,
           std::exp(v.loss),
           v.loss_spread ? fmt::format(", spread of losses over groups {:.4f}", *v.loss_spread) : "",
           v.tokens, v.seconds);
  step_end_ = device_.record(compute_);
}

}  // namespace

ExitCode run_training(const TrainOptions& options, MpiSession& session) {
  const StopSignals signals;  // before the backend starts its threads
  StatusRecord status(session.rank(), session.size());
  Backend backend = make_backend(options.config, session, &status);
  const RunFolder folder = open_run_folder(*backend.world, options.config, options.resume);
  status.keep_in(folder.status() + "/" + status_file_name(session.rank()));
  configure_log(backend.world->rank(), backend.world->rank() == 0 ? folder.log() : "");
  Trainer trainer(options, backend, folder, status, signals);
  const ExitCode code = trainer.run();
  backend.world->barrier({Traffic::control, "end of the run", trainer.steps_taken()});
  status.enter(code == ExitCode::done ? RunPhase::done : RunPhase::stopped);
  return code;
}

}  // namespace strata
