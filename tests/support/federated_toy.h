#pragma once
// Federated training of the toy model on threads as ranks: inner SGD, any mesh, any federation.
#include <cstring>
#include <memory>

#include "federation/plan.h"
#include "federation/scheduler.h"
#include "optim/optimizer.h"
#include "tests/support/toy_training.h"
#include "tests/support/units.h"

namespace strata {

constexpr double kRate = 0.05;

struct FederatedCase {
  Mesh mesh{1, 1, 1};
  FederationOptions federation;
  EngineOptions engine;
  int steps = 9;
  bool identical_data = false;  // every group sees the first group's data
  std::uint64_t seed = 0;
  bool eager = false;
  int resume_at = 0;  // after this step everything is saved, thrown away and restored
};

struct FederatedResult {
  std::vector<std::vector<float>> parameters;  // by unit
  ByteCounters shard, replicate, federate;
  MemoryUse memory;
  std::vector<bool> aggregated;  // by step, what after_step returned
};

// Tokens of a rank in a step: groups differ, and not always by the same factor, so that weights matter.
inline std::int64_t toy_tokens(int group, int step) {
  return 3 + 2 * group * (step % 4);
}

struct SavedRank {
  std::vector<std::vector<std::byte>> shards, outer;
  std::vector<std::int64_t> counts;
};

class FederatedRank {
 public:
  // `shared`: the device that the world lives on; nullptr: one of its own.
  FederatedRank(World& world, const FederatedCase& c, CpuDevice* shared = nullptr)
      : c_(c),
        toy_(shared != nullptr
                 ? std::make_unique<ToyRank>(*shared, world, c.mesh, make_units(3, false), options(c.engine))
                 : std::make_unique<ToyRank>(world, c.mesh, make_units(3, false), options(c.engine),
                                             device_options(c, world.rank()))),
        optimizer_(*toy_->engine, toy_->groups, *toy_->device, *toy_->ops, toy_->compute, sgd()),
        scheduler_(*toy_->engine, toy_->groups, *toy_->device, *toy_->ops, toy_->compute, c.federation),
        tokens_(toy_->device->allocate(sizeof(double), Purpose::data)) {
    scheduler_.initialize();
    toy_->device->synchronize();
  }

  bool step(int step) {
    const int group_size = c_.mesh.replicate() * c_.mesh.shard();
    toy_->engine->begin_step(step);
    scheduler_.count_tokens(step, toy_tokens(data_group(), step));
    toy_->micro_step(0, data_group() * group_size + toy_->groups.position % group_size);
    toy_->engine->finish_gradients();
    cpu_stream(toy_->compute).run([to = tokens_.as<double>(), n = toy_tokens(data_group(), step)] {
      *to = static_cast<double>(n);
    });
    optimizer_.step(step, kRate, tokens_.as<double>());
    return scheduler_.after_step(step);
  }

  FederatedResult result() {
    FederatedResult r;
    scheduler_.finish();
    toy_->device->synchronize();
    r.memory = toy_->device->memory();
    r.shard = toy_->groups.shard->counters();
    r.replicate = toy_->groups.replicate->counters();
    r.federate = toy_->groups.federate->counters();
    for (int u = 0; u < static_cast<int>(toy_->engine->units().size()); ++u)
      r.parameters.push_back(toy_->engine->gather_parameters(u));
    return r;
  }

  SavedRank save() {
    scheduler_.finish();
    toy_->device->synchronize();
    SavedRank saved;
    for (const auto& shard : toy_->engine->shards()) saved.shards.push_back(bytes_of(shard.parameter));
    for (const auto& state : scheduler_.state()) saved.outer.push_back(bytes_of(state.data));
    saved.counts = scheduler_.host_state();
    return saved;
  }

  void restore(const SavedRank& saved, int step) {
    for (std::size_t u = 0; u < saved.shards.size(); ++u)
      std::memcpy(toy_->engine->shards()[u].parameter.data, saved.shards[u].data(), saved.shards[u].size());
    toy_->engine->parameters_changed();
    scheduler_.set_host_state(saved.counts);
    scheduler_.resume(step);
    const auto states = scheduler_.state();
    if (states.size() != saved.outer.size()) throw InternalError("resume: other outer state than was saved");
    for (std::size_t i = 0; i < states.size(); ++i)
      std::memcpy(states[i].data.data, saved.outer[i].data(), saved.outer[i].size());
    toy_->device->synchronize();
  }

  FederationScheduler& scheduler() { return scheduler_; }

 private:
  static EngineOptions options(EngineOptions o) {
    o.moments = false;
    return o;
  }
  static OptimizerOptions sgd() {
    OptimizerOptions o;
    o.adamw = false;
    o.weight_decay = 0;
    o.clip = 0;
    return o;
  }
  static CpuDeviceOptions device_options(const FederatedCase& c, int rank) {
    return {c.eager ? CpuDeviceOptions::eager : CpuDeviceOptions::deferred,
            c.seed * 100 + static_cast<std::uint64_t>(rank), true};
  }
  static std::vector<std::byte> bytes_of(const Flat& flat) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(flat.bytes()));
    std::memcpy(bytes.data(), flat.data, bytes.size());
    return bytes;
  }
  int data_group() const { return c_.identical_data ? 0 : toy_->groups.at.federate; }

  FederatedCase c_;
  std::unique_ptr<ToyRank> toy_;
  Optimizer optimizer_;
  FederationScheduler scheduler_;
  Buffer tokens_;
};

inline std::vector<FederatedResult> train_federated(const FederatedCase& c) {
  std::vector<FederatedResult> results(static_cast<std::size_t>(c.mesh.size()));
  run_ranks(c.mesh.size(), [&](World& world) {
    auto rank = std::make_unique<FederatedRank>(world, c);
    std::vector<bool> aggregated;
    for (int step = 1; step <= c.steps; ++step) {
      aggregated.push_back(rank->step(step));
      if (step != c.resume_at) continue;
      const SavedRank saved = rank->save();
      rank.reset();
      // Communicators of the same names meet again, on other numbers than those of the first life.
      rank = std::make_unique<FederatedRank>(world, c);
      rank->restore(saved, step);
    }
    results[static_cast<std::size_t>(world.rank())] = rank->result();
    results[static_cast<std::size_t>(world.rank())].aggregated = aggregated;
  });
  return results;
}

}  // namespace strata
