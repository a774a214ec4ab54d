#pragma once
// From --resume to a checkpoint to continue from.
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "checkpoint/manifest.h"
#include "config/config.h"
#include "train/run_folder.h"

namespace strata {

// Collective over the world. Tries the checkpoints that `resume` names ("auto": those of the run folder,
// newest first; another run's folder: those of that one; else that one checkpoint): reads the manifest,
// compares configurations, and calls `load`, which restores this rank's part or throws DataError. Of several,
// a damaged one is passed over, loudly, as long as there is another. Returns the manifest of the one that was
// restored; empty with "auto" in a run folder without checkpoints. In the run's own folder, damaged and later
// checkpoints are then set aside (.damaged, .superseded). Throws DataError when none is whole or a named run
// folder has none, UsageError when the configuration does not fit.
using LoadCheckpoint =
    std::function<void(const std::filesystem::path& folder, const CheckpointManifest& manifest)>;
std::optional<CheckpointManifest> resume_run(World& world, const RunFolder& run, const std::string& resume,
                                             const Config& config, const LoadCheckpoint& load);

}  // namespace strata
