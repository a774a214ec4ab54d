#pragma once
#include <string>

#include "backend/communicator.h"
#include "config/config.h"

namespace strata {

// The run folder: config.resolved.json, metrics.jsonl, log.txt, checkpoints/.
struct RunFolder {
  std::string path;
  std::string metrics() const { return path + "/metrics.jsonl"; }
  std::string log() const { return path + "/log.txt"; }
  std::string resolved_config() const { return path + "/config.resolved.json"; }
  std::string checkpoints() const { return path + "/checkpoints"; }
  std::string status() const { return path + "/status"; }
};

// Collective over the world. Refuses ranks with different configurations, and a folder that already holds a
// run (metrics or checkpoints) unless `resume` continues that very run: it is "auto" or one of the folder's
// own checkpoints (UsageError, saying how to go on). Creates the folder on rank 0.
RunFolder open_run_folder(World& world, const Config& config, const std::string& resume);

// Writes config.resolved.json, once the run is known to start. Throws DataError.
void write_resolved_config(const RunFolder& folder, const Config& config);

}  // namespace strata
