// mesh_probe CASES: trains every configuration of a list (JSON) on this world, one after the other, and
// writes what it saw into each run's folder:
//   gradients.f32               step 1: the units' gradients (sums over the group's tokens), of mesh position
//   0 parameters.F.R.f32          at the end: the units' parameters of federation group F, replica R
//   bytes.RANK.json             what the communicators counted, what MPI was asked to move, and the plan by
//   step
// Units follow each other without padding.
#include <fmt/format.h>

#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>

#include "backend/mpi/mpi_call.h"
#include "base/error.h"
#include "base/log.h"
#include "config/json.h"
#include "config/load.h"
#include "federation/plan.h"
#include "train/trainer.h"

using namespace strata;

namespace {

std::atomic<std::int64_t> g_sent{0}, g_received{0};

std::int64_t bytes_of(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return std::int64_t{count} * size;
}

nlohmann::json to_json(const ByteCounters& counters) {
  constexpr std::array kTraffic = {"training", "edge", "control", "evaluation", "checkpoint"};
  nlohmann::json out = nlohmann::json::object();
  for (std::size_t t = 0; t < kTraffic.size(); ++t)
    for (int c = 0; c < static_cast<int>(Collective::count_); ++c) {
      const auto& entry = counters.at(static_cast<Traffic>(t), static_cast<Collective>(c));
      if (entry.calls == 0) continue;
      out[kTraffic[t]][name_of(static_cast<Collective>(c))] = {
          {"received", entry.received}, {"sent", entry.sent}, {"calls", entry.calls}};
    }
  return out;
}

class Probe final : public TrainingObserver {
 public:
  explicit Probe(const Config& config) : config_(config) {}

  void initialized(ShardingEngine&, const MeshGroups&) override { g_sent = 0, g_received = 0; }

  void reduced(std::int64_t step, ShardingEngine& engine) override {
    if (step != 1) return;
    for (int u = 0; u < units(engine); ++u) append(gradients_, engine.gather_gradients(u));
  }

  void finished(ShardingEngine& engine, const MeshGroups& groups) override {
    std::vector<float> parameters;
    for (int u = 0; u < units(engine); ++u) append(parameters, engine.gather_parameters(u));
    if (groups.position == 0) write("gradients.f32", gradients_);
    if (groups.at.shard == 0)
      write(fmt::format("parameters.{}.{}.f32", groups.at.federate, groups.at.replicate), parameters);
    write_bytes(engine, groups);
  }

 private:
  static int units(const ShardingEngine& engine) { return static_cast<int>(engine.units().size()); }
  static void append(std::vector<float>& all, const std::vector<float>& unit) {
    all.insert(all.end(), unit.begin(), unit.end());
  }

  void write_bytes(const ShardingEngine& engine, const MeshGroups& groups) const {
    nlohmann::json out;
    out["intercepted"] = {{"sent", g_sent.load()}, {"received", g_received.load()}};
    for (const Communicator* c : {groups.shard.get(), groups.replicate.get(), groups.federate.get(),
                                  groups.group.get(), groups.world.get()})
      out["counted"][c->name()] = to_json(c->counters());
    for (std::int64_t step = 1; step <= config_.schedule.steps; ++step) {
      BytePlan plan = plan_step_bytes(engine.units(), groups.mesh, groups.position, engine.options());
      plan += plan_federation_bytes(engine.units(), groups.mesh, groups.position, engine.options().precision,
                                    FederationOptions::from(config_), step);
      out["planned"].push_back({{"shard", to_json(plan.shard)},
                                {"replicate", to_json(plan.replicate)},
                                {"federate", to_json(plan.federate)}});
    }
    const std::string text = out.dump();
    write(fmt::format("bytes.{}.json", groups.position), std::vector<char>(text.begin(), text.end()));
  }

  template <class T>
  void write(const std::string& name, const std::vector<T>& values) const {
    const std::string path = config_.run_dir + "/" + name;
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(T)));
    file.close();
    if (!file) throw DataError("cannot write " + path + " -> check the disk");
  }

  const Config& config_;
  std::vector<float> gradients_;
};

}  // namespace

// MPI's profiling interface: these take the place of the library's functions.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  g_sent += bytes_of(count, type);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
extern "C" int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  g_received += bytes_of(count, type);
  return PMPI_Irecv(data, count, type, from, tag, comm, request);
}

int main(int argc, char** argv) {
  MpiSession session(60);
  try {
    if (argc != 2) throw UsageError("usage: mesh_probe CASES.json");
    std::ifstream file(argv[1]);
    for (const auto& given : nlohmann::json::parse(file)) {
      const Config config = read_config(given.dump(), argv[1]);
      Probe probe(config);
      if (run_training({config, "", &probe}, session) != ExitCode::done)
        throw InternalError(config.run_dir + " did not finish");
    }
    return 0;
  } catch (const std::exception& e) {
    log_error("{}", e.what());
    MpiSession::abort(1);
  }
}
