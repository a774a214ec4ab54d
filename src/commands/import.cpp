#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"
#include "checkpoint/hf_folder.h"
#include "checkpoint/save.h"
#include "commands/model.h"
#include "commands/ranks.h"
#include "config/json.h"
#include "config/load.h"
#include "data/dataset.h"
#include "federation/scheduler.h"
#include "model/parameter_table.h"
#include "sharding/engine.h"
#include "train/backend_factory.h"
#include "train/run_folder.h"

namespace strata {
namespace {

Config config_with_model_of(const ImportArguments& a) {
  std::vector<std::string> sets = a.sets;
  for (const std::string& set : sets)
    if (set.starts_with("model.") || set.starts_with("model="))
      throw UsageError(
          fmt::format("--set {}: the model is the one that {}/config.json describes -> leave it out, or "
                      "change that file",
                      set, a.folder));
  const nlohmann::json model = {{"path", (std::filesystem::path(a.folder) / "config.json").string()}};
  sets.push_back("model=" + model.dump());
  return load_config(a.config, sets);
}

// A configuration for another run may be used again; that its model is not must be said.
void tell_of_unused_model(const ImportArguments& a) {
  const Json root = parse_json(read_text_file(a.config, "configuration"), a.config);
  if (root.contains("model"))
    log_warning("{}: its section model is not used: the model is the one that {}/config.json describes",
                a.config, a.folder);
}

void save_start(const Config& config, const HfFolder& weights, const RunFolder& folder, Backend& backend) {
  Device& device = *backend.device;
  const MeshGroups groups = make_groups(*backend.world, Mesh(config.mesh));
  Stream& compute = device.create_stream("compute", Device::StreamKind::compute);
  ShardingEngine engine(llama_units(config.model), groups, device, *backend.ops, compute,
                        EngineOptions::from(config));
  FederationScheduler federation(engine, groups, device, *backend.ops, compute,
                                 FederationOptions::from(config));
  load_weights(weights, engine, device, compute);
  federation.initialize();
  device.synchronize();

  CheckpointManifest state;
  state.data_sequences =
      TokenDataset(config.data.train, config.data.sequence_length, config.model.vocab_size).sequences();
  state.aggregated = true;
  state.config = config;
  const auto path = CheckpointSaver(*backend.world, groups, device, compute, engine, federation,
                                    folder.checkpoints(), config.checkpoint.keep)
                        .save(state);
  log_info("{} parameters of {} are in {} -> train with --config {} --resume auto",
           parameter_count(engine.units()), weights.folder().string(), path.string(),
           folder.resolved_config());
}

}  // namespace

ExitCode import_command(const ImportArguments& a) {
  return run_on_ranks([&a](MpiSession& session) {
    const Config config = config_with_model_of(a);
    if (session.rank() == 0) tell_of_unused_model(a);
    const HfFolder weights(a.folder);
    Backend backend = make_backend(config, session);
    const RunFolder folder = open_run_folder(*backend.world, config, "");
    if (session.rank() == 0) write_resolved_config(folder, config);
    save_start(config, weights, folder, backend);
    backend.world->barrier({Traffic::control, "end of the import", 0});
    return ExitCode::done;
  });
}

}  // namespace strata
