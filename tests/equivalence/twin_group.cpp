// twin_group CONFIG GROUP: one federation group of a run, trained by a single process that has never heard of
// the others. It reads the sequences that DESIGN's data formula gives to the group's ranks, in one batch, and
// takes its orders from standard input, answering each with a line:
//   reset            initial weights and moments, step 0        -> "0"
//   train N          N optimizer steps                          -> target tokens they have used
//   save PATH        fp32 parameters, unit after unit           -> "0"
//   load PATH        replaces the parameters, not the moments   -> "0"
#include <fmt/format.h>

#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include "backend/cpu/device.h"
#include "backend/cpu/ops.h"
#include "backend/mpi/session.h"
#include "base/error.h"
#include "base/log.h"
#include "config/load.h"
#include "data/dataset.h"
#include "model/llama.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"

using namespace strata;

namespace {

class TwinGroup {
 public:
  TwinGroup(const Config& config, MpiSession& session, std::int64_t group)
      : config_(config),
        group_(group),
        group_ranks_(config.mesh.replicate * config.mesh.shard),
        world_ranks_(config.mesh.federate * group_ranks_),
        device_(make_cpu_device()),
        ops_(make_cpu_ops(*device_)),
        world_(make_mpi_world(session, *device_)),
        groups_(make_groups(*world_, Mesh(1, 1, 1))),
        compute_(device_->create_stream("compute", Device::StreamKind::compute)),
        model_(setup(), *device_, *ops_),
        engine_(model_.units(), groups_, *device_, *ops_, compute_, EngineOptions::from(config)),
        optimizer_(engine_, groups_, *device_, *ops_, compute_, OptimizerOptions::from(config)),
        data_(config.data.train, config.data.sequence_length, config.model.vocab_size),
        reader_(data_, Sampler(data_.sequences(), config.seed), config.data.ignore_token) {}

  void reset() {
    engine_.initialize(config_.seed);
    step_ = 0, position_ = 0;
  }

  std::int64_t train(std::int64_t steps) {
    std::int64_t tokens = 0;
    for (std::int64_t i = 0; i < steps; ++i) tokens += step();
    return tokens;
  }

  void save(const std::string& path) {
    std::ofstream file(path, std::ios::binary);
    for (int u = 0; u < static_cast<int>(engine_.units().size()); ++u) {
      const auto values = engine_.gather_parameters(u);
      file.write(reinterpret_cast<const char*>(values.data()),
                 static_cast<std::streamsize>(values.size() * sizeof(float)));
    }
    file.close();
    if (!file) throw DataError("cannot write " + path + " -> check the disk");
  }

  void load(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    device_->synchronize();
    for (UnitShard& shard : engine_.shards())
      file.read(static_cast<char*>(shard.parameter.data),
                static_cast<std::streamsize>(shard.spec->elements) * 4);
    if (!file) throw DataError(path + " is shorter than the model -> save what is loaded");
    engine_.parameters_changed();
  }

 private:
  LlamaSetup setup() const {
    LlamaSetup s;
    s.config = config_.model;
    s.batch = config_.data.batch_size * group_ranks_;
    s.sequence = config_.data.sequence_length;
    return s;
  }

  // Micro-step k of rank g reads B sequences from position + (k W + g) B on; a group's ranks are neighbours.
  std::int64_t step() {
    const std::int64_t B = config_.data.batch_size, K = config_.gradient_accumulation;
    const auto tokens_of_batch = static_cast<std::size_t>(B * group_ranks_ * config_.data.sequence_length);
    std::vector<std::int32_t> tokens(tokens_of_batch), targets(tokens_of_batch);
    std::int64_t used = 0;
    double loss = 0;
    engine_.begin_step(++step_);
    for (std::int64_t k = 0; k < K; ++k) {
      engine_.begin_micro_step(static_cast<int>(k));
      reader_.read(position_ + (k * world_ranks_ + group_ * group_ranks_) * B, tokens, targets);
      for (const std::int32_t t : targets) used += t >= 0 ? 1 : 0;
      model_.forward_backward(compute_, engine_, tokens.data(), targets.data(), &loss);
    }
    engine_.finish_gradients();
    const auto count = static_cast<double>(used);
    optimizer_.step(step_, learning_rate(config_.schedule, config_.optimizer.lr, step_), &count);
    device_->synchronize();
    position_ += K * world_ranks_ * B;
    return used;
  }

  const Config& config_;
  std::int64_t group_, group_ranks_, world_ranks_;
  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<World> world_;
  MeshGroups groups_;
  Stream& compute_;
  Llama model_;
  ShardingEngine engine_;
  Optimizer optimizer_;
  TokenDataset data_;
  SequenceReader reader_;
  std::int64_t step_ = 0, position_ = 0;
};

std::int64_t obey(TwinGroup& twin, const std::string& line) {
  std::istringstream words(line);
  std::string order, argument;
  words >> order >> argument;
  if (order == "train") return twin.train(std::stoll(argument));
  if (order == "reset") {
    twin.reset();
  } else if (order == "save") {
    twin.save(argument);
  } else if (order == "load") {
    twin.load(argument);
  } else {
    throw UsageError("unknown order \"" + line + "\" -> reset, train N, save PATH or load PATH");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw UsageError("usage: twin_group CONFIG GROUP");
    const Config config = load_config(argv[1]);
    MpiSession session;
    TwinGroup twin(config, session, std::stoll(argv[2]));
    for (std::string line; std::getline(std::cin, line);)
      std::cout << obey(twin, line) << std::endl;  // flushed: the other side waits for it
    return 0;
  } catch (const std::exception& e) {
    log_error("{}", e.what());
    return 1;
  }
}
