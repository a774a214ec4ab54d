#include "train/resume.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "checkpoint/agree.h"
#include "checkpoint/folder.h"
#include "checkpoint/restore.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

// A line each, newest first.
std::string list_candidates(const RunFolder& run, const std::string& resume) {
  const bool automatic = resume == "auto";
  const RunFolder from{automatic ? run.path : resume_path(resume).string()};
  if (!automatic && !is_run_folder(from)) return from.path + '\n';
  std::string text;
  const std::vector<CheckpointFolder> found = list_checkpoints(from.checkpoints());
  for (auto c = found.rbegin(); c != found.rend(); ++c) text.append(c->path.string()).append(1, '\n');
  if (!automatic && text.empty())
    throw DataError(
        fmt::format("{}: this run folder holds no checkpoint -> give a folder step_<number> of another run's "
                    "checkpoints, "
                    "or start at step 1 without --resume in another run_dir",
                    from.path));
  return text;
}

std::vector<fs::path> candidates(World& world, const RunFolder& run, const std::string& resume) {
  const std::string names = agree(world, "resume", 0, [&] {
                              return world.rank() == 0 ? list_candidates(run, resume) : std::string();
                            }).at(0);
  std::vector<fs::path> found;
  for (std::size_t begin = 0; begin < names.size();) {
    const std::size_t end = names.find('\n', begin);
    found.emplace_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  return found;
}

CheckpointManifest try_one(World& world, const fs::path& folder, const Config& config,
                           const LoadCheckpoint& load) {
  const std::string text = agree(world, "resume", 0, [&] {
                             return world.rank() == 0 ? read_manifest_text(folder) : std::string();
                           }).at(0);
  CheckpointManifest manifest = read_manifest(text, (folder / kManifestFile).string());
  for (const std::string& change : compatible_changes(manifest, config))
    log_info("resuming with another value of {}", change);
  agree(world, "resume", 0, [&] {
    load(folder, manifest);
    return std::string();
  });
  return manifest;
}

// Only what lies in the run's own folder: others keep theirs.
void tidy(World& world, const RunFolder& run, const fs::path& used, std::int64_t step,
          const std::vector<fs::path>& damaged) {
  agree(world, "resume", 0, [&] {
    std::error_code error;
    if (world.rank() != 0 || !fs::equivalent(used.parent_path(), run.checkpoints(), error))
      return std::string();
    for (const fs::path& path : damaged)
      log_warning("{} is damaged: it is now called {}", path.string(),
                  set_aside(path, "damaged").filename().string());
    for (const CheckpointFolder& later : list_checkpoints(run.checkpoints())) {
      if (later.step <= step) continue;
      log_warning("{} is later than the checkpoint that is resumed: it is now called {}", later.path.string(),
                  set_aside(later.path, "superseded").filename().string());
    }
    return std::string();
  });
}

}  // namespace

std::optional<CheckpointManifest> resume_run(World& world, const RunFolder& run, const std::string& resume,
                                             const Config& config, const LoadCheckpoint& load) {
  const std::vector<fs::path> all = candidates(world, run, resume);
  std::vector<fs::path> damaged;
  for (const fs::path& folder : all) {
    try {
      CheckpointManifest manifest = try_one(world, folder, config, load);
      tidy(world, run, folder, manifest.step, damaged);
      log_info("resumed from {}: step {}, {} sequences consumed", folder.string(), manifest.step,
               manifest.sequences_consumed);
      return manifest;
    } catch (const DataError& e) {
      damaged.push_back(folder);
      if (damaged.size() == all.size()) throw;
      if (world.rank() == 0)
        log_error("THE CHECKPOINT {} IS DAMAGED AND NOT USED: {}; falling back to the one before it",
                  folder.string(), e.what());
    }
  }
  if (world.rank() == 0)
    log_warning("--resume auto: {} holds no checkpoint; starting at step 1", run.checkpoints());
  return std::nullopt;
}

}  // namespace strata
