#include "train/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "backend/cpu/device.h"
#include "backend/cpu/ops.h"
#include "backend/mpi/session.h"
#include "backend/mpi/wire_plan.h"
#include "federation/options.h"
#include "federation/plan.h"
#include "model/parameter_table.h"
#include "sharding/layout.h"
#include "train/control.h"

namespace strata {
namespace {

std::size_t& at(MemoryPlan& plan, Purpose purpose) {
  return plan[static_cast<std::size_t>(purpose)];
}

void add(MemoryPlan& sum, const MemoryPlan& part) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
}

// The step of the first aggregation that moves something; streaming sends fragments one by one.
std::int64_t first_aggregation(const std::vector<UnitSpec>& units, const Mesh& mesh,
                               const Precision& precision, const FederationOptions& options,
                               BytePlan& bytes) {
  for (std::int64_t step = 1; step <= std::min(options.every, options.last_step); ++step) {
    bytes = plan_federation_bytes(units, mesh, 0, precision, options, step);
    for (const ByteCounters* counters : {&bytes.federate, &bytes.replicate}) {
      for (const auto& by_collective : counters->entries) {
        for (const auto& entry : by_collective) {
          if (entry.calls > 0) return step;
        }
      }
    }
  }
  return 0;
}

// Scratch of reductions over MPI: each stream (shard, replica, federation) has one in flight.
std::size_t reduction_workspace(const std::vector<UnitSpec>& units, const Mesh& mesh,
                                const Precision& precision, const FederationOptions& federation) {
  const MpiOptions mpi;
  std::int64_t shard = 0, replicate = 0, federate = 0;
  auto largest = [&](std::int64_t& sum, std::int64_t count, DType wire, int size) {
    sum = std::max(sum, reduction_scratch(count, wire, size, 0, mpi.message_bytes, mpi.scratch_bytes).bytes);
  };
  for (const UnitSpec& unit : units) {
    const std::int64_t count = shard_elements(unit, mesh.shard());
    largest(shard, count * mesh.shard(), precision.wire, mesh.shard());
    largest(replicate, count, precision.wire, mesh.replicate());
    // int8 travels by all-gather and is added from the outer state's buffers.
    if (federation.wire != DType::i8) largest(federate, count, federation.wire, mesh.federate());
  }
  return static_cast<std::size_t>(shard + replicate + federate);
}

std::string show_bytes(double bytes) {
  const std::array<const char*, 5> units = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < units.size()) bytes /= 1024, ++unit;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, units[unit]);
}

// "[0,4,8,12] ... (16 groups of 4)": the first groups in full where they are short.
std::string show_groups(const char* name, int groups, const std::vector<std::vector<int>>& first) {
  std::string text = fmt::format("  {:<18}{} of {}:", name, groups, first.front().size());
  for (const std::vector<int>& group : first) {
    constexpr std::size_t kShown = 8;
    if (group.size() <= kShown) {
      text += fmt::format(" [{}]", fmt::join(group, ","));
    } else {
      text += fmt::format(" [{},...,{}]", fmt::join(group.begin(), group.begin() + 3, ","), group.back());
    }
  }
  return text + (static_cast<int>(first.size()) < groups ? " ...\n" : "\n");
}

std::string describe_mesh(const Mesh& mesh) {
  const int F = mesh.federate(), R = mesh.replicate(), S = mesh.shard();
  std::string text =
      fmt::format("mesh {}\n  ranks needed      {} x {} x {} = {}\n", mesh.describe(), F, R, S, mesh.size());
  // Positions that begin the first two groups of each kind.
  auto first_two = [](int groups, auto group_of) {
    std::vector<std::vector<int>> out;
    for (int i = 0; i < std::min(groups, 2); ++i) out.push_back(group_of(i));
    return out;
  };
  text +=
      show_groups("shard groups", F * R, first_two(F * R, [&](int i) { return mesh.shard_group(i * S); }));
  text += show_groups("replica groups", F * S, first_two(F * S, [&](int i) {
                        return mesh.replica_group(mesh.position({i / S, 0, i % S}));
                      }));
  text += show_groups("federation peers", R * S,
                      first_two(R * S, [&](int i) { return mesh.federation_peers(i); }));
  return text;
}

// Measured: 20 with one rank and a small model, 50 with large matrices, whose kernels are generated.
constexpr int kProcessMebibytes = 40;

std::string describe_memory(const RunPlan& plan) {
  std::string text = "memory of a rank\n";
  for (int i = 0; i < kPurposes; ++i) {
    const auto bytes = static_cast<double>(plan.memory[static_cast<std::size_t>(i)]);
    const auto purpose = static_cast<Purpose>(i);
    text += fmt::format("  {:<18}{}{}\n", name_of(purpose), show_bytes(bytes),
                        purpose == Purpose::workspace && !plan.knows_operations
                            ? " (without the scratch of operations and collectives, which depends on the GPU)"
                            : "");
  }
  const std::size_t total = std::accumulate(plan.memory.begin(), plan.memory.end(), std::size_t{0});
  text += fmt::format("  {:<18}{} ({} bytes)\n", "total", show_bytes(static_cast<double>(total)), total);
  if (plan.knows_operations)
    text += fmt::format(
        "  besides, for the process itself (program, libraries, generated kernels, pages of shards): about "
        "{} MiB\n",
        kProcessMebibytes);
  return text;
}

void describe_counters(std::string& text, const char* group, const ByteCounters& counters) {
  for (const Traffic traffic : {Traffic::training, Traffic::edge}) {
    for (int c = 0; c < static_cast<int>(Collective::count_); ++c) {
      const auto collective = static_cast<Collective>(c);
      const auto& entry = counters.at(traffic, collective);
      if (entry.calls == 0) continue;
      text += fmt::format("  {:<18}{:<15}{:<14}{} in {} calls ({} bytes)\n", group, name_of(collective),
                          traffic == Traffic::training ? "decoder units" : "edge units",
                          show_bytes(static_cast<double>(entry.received)), entry.calls, entry.received);
    }
  }
}

std::string describe_bytes(const RunPlan& plan) {
  std::string text, aggregation;
  describe_counters(text, "shard group", plan.step.shard);
  describe_counters(text, "replica group", plan.step.replicate);
  describe_counters(aggregation, "federation peers", plan.aggregation.federate);
  describe_counters(aggregation, "replica group", plan.aggregation.replicate);
  std::string out = "bytes rank 0 receives in a step\n" + (text.empty() ? "  none\n" : text);
  if (!aggregation.empty()) {
    out += fmt::format("and for the aggregation after step {}\n", plan.aggregation_step) + aggregation;
  }
  return out;
}

}  // namespace

LlamaSetup llama_setup(const Config& config) {
  const Precision precision = Precision::from(config.precision, config.reduce_dtype);
  LlamaSetup s;
  s.config = config.model;
  s.batch = config.data.batch_size;
  s.sequence = config.data.sequence_length;
  s.compute = precision.compute;
  s.gradient = precision.gradient;
  s.recompute = recompute_from(config.recompute);
  return s;
}

BatchShape batch_shape(const Config& config, const Mesh& mesh, int position) {
  BatchShape s;
  s.batch_size = config.data.batch_size;
  s.sequence_length = config.data.sequence_length;
  s.micro_steps = config.gradient_accumulation;
  const int group = mesh.replicate() * mesh.shard();
  const bool identical = config.data.groups == "identical";
  s.readers = identical ? group : mesh.size();
  s.reader = identical ? position % group : position;
  return s;
}

RunPlan plan_run(const Config& config) {
  const Mesh mesh(config.mesh);
  const std::vector<UnitSpec> units = llama_units(config.model);
  const EngineOptions engine = EngineOptions::from(config);
  const FederationOptions federation = FederationOptions::from(config);
  const LlamaSetup setup = llama_setup(config);
  check_setup(setup);

  RunPlan plan{mesh};
  plan.parameters = parameter_count(units);
  plan.tokens_per_step =
      mesh.size() * config.data.batch_size * config.gradient_accumulation * config.data.sequence_length;
  plan.memory = engine_memory(units, mesh, engine);
  add(plan.memory, federation_memory(units, mesh, engine.precision, federation));
  plan.activations = plan_activations(setup);
  at(plan.memory, Purpose::activations) += plan.activations.bytes;
  at(plan.memory, Purpose::data) +=
      Batches::bytes(batch_shape(config, mesh, 0)) + 2 * (sizeof(RankReport) + sizeof(std::int32_t));
  if (config.device == "cpu") {
    const auto device = make_cpu_device();
    plan.knows_operations = true;
    at(plan.memory, Purpose::workspace) +=
        make_cpu_ops(*device, {.threads = config.threads})->workspace_bytes(workload(setup)) +
        reduction_workspace(units, mesh, engine.precision, federation);
  }
  plan.step = plan_step_bytes(units, mesh, 0, engine);
  plan.checkpoint = plan_checkpoint_bytes(config);
  plan.aggregation_step = first_aggregation(units, mesh, engine.precision, federation, plan.aggregation);
  return plan;
}

std::string describe(const Config& config, const RunPlan& plan) {
  std::string text = describe_mesh(plan.mesh);
  text += fmt::format("model\n  {:<18}{}\n  {:<18}{} in all ({} steps of {})\n", "parameters",
                      plan.parameters, "tokens", plan.tokens_per_step * config.schedule.steps,
                      config.schedule.steps, plan.tokens_per_step);
  text += describe_memory(plan) + describe_bytes(plan);
  text += fmt::format(
      "checkpoint on disk\n  {:<18}{} ({} bytes)\n", plan.mesh.federate() > 1 ? "after aggregating" : "size",
      show_bytes(static_cast<double>(plan.checkpoint.aggregated)), plan.checkpoint.aggregated);
  if (plan.mesh.federate() > 1)
    text += fmt::format("  {:<18}{} ({} bytes)\n", "between",
                        show_bytes(static_cast<double>(plan.checkpoint.between)), plan.checkpoint.between);
  return text;
}

}  // namespace strata
