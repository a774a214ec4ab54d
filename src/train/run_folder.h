#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "backend/communicator.h"
#include "config/config.h"

namespace strata {

// The run folder: config.resolved.json, metrics.jsonl, log.txt, checkpoints/, status/, lock.
struct RunFolder {
  std::string path;
  std::shared_ptr<const void> lock = nullptr;  // rank 0: while it lives, no other job opens the folder
  std::string metrics() const { return path + "/metrics.jsonl"; }
  std::string log() const { return path + "/log.txt"; }
  std::string resolved_config() const { return path + "/config.resolved.json"; }
  std::string checkpoints() const { return path + "/checkpoints"; }
  std::string status() const { return path + "/status"; }
  std::string lock_file() const { return path + "/lock"; }
};

// Whether this is the folder of a run and not of a checkpoint.
bool is_run_folder(const RunFolder& folder);

// What --resume names, without the slash at its end that a shell's completion leaves.
std::filesystem::path resume_path(const std::string& resume);

// Collective over the world. Refuses ranks with different configurations or --resume, a folder that another
// job is writing to, and one that already holds a run (metrics or checkpoints) unless `resume` continues that
// very run: it is "auto", the folder or one of its checkpoints (UsageError, saying how to go on). Creates
// the folder and locks it on rank 0. The lock ends with the process, however it ends; a file system without
// locks is warned of.
RunFolder open_run_folder(World& world, const Config& config, const std::string& resume);

// Writes config.resolved.json, once the run is known to start. Throws DataError.
void write_resolved_config(const RunFolder& folder, const Config& config);

}  // namespace strata
