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
// run unless `resuming` (UsageError, saying how to go on); creates the folder and writes the resolved
// configuration on rank 0.
RunFolder open_run_folder(World& world, const Config& config, bool resuming);

}  // namespace strata
