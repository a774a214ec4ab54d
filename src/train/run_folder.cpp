#include "train/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"
#include "checkpoint/agree.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "config/load.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

// The first key whose values differ, as "a.b: 1 here, 2 there".
std::string first_difference(const std::string& here, const std::string& there) {
  const auto a = nlohmann::json::parse(here).flatten(), b = nlohmann::json::parse(there).flatten();
  for (const auto& [key, value] : a.items()) {
    if (!b.contains(key) || b[key] != value) {
      return fmt::format("{} is {} there and {} here", key, b.contains(key) ? b[key].dump() : "absent",
                         value.dump());
    }
  }
  return "a key of one is absent in the other";
}

void require_one_config(World& world, const std::string& resolved) {
  const std::vector<std::string> all = world.gather_strings({Traffic::control, "configuration", 0}, resolved);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw UsageError(
        fmt::format("rank {} has another configuration than rank 0: {} -> start every rank with the same "
                    "--config and --set",
                    rank, first_difference(all[rank], all[0])));
  }
}

void require_one_resume(World& world, const std::string& resume) {
  const std::vector<std::string> all = world.gather_strings({Traffic::control, "--resume", 0}, resume);
  const auto name = [](const std::string& r) { return r.empty() ? "no --resume" : "--resume " + r; };
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw UsageError(
        fmt::format("rank {} was started with {} and rank 0 with {} -> give every rank the same --resume",
                    rank, name(all[rank]), name(all[0])));
  }
}

bool holds_run(const RunFolder& folder) {
  std::error_code error;
  return fs::exists(folder.metrics(), error) || !list_checkpoints(folder.checkpoints()).empty();
}

bool continues(const RunFolder& folder, const std::string& resume) {
  if (resume.empty() || resume == "auto") return !resume.empty();
  std::error_code error;
  const fs::path path = resume_path(resume);
  return fs::equivalent(path.parent_path(), folder.checkpoints(), error) ||
         fs::equivalent(path, folder.path, error);
}

// A lock of the open file (not of the process: closing another descriptor must not end it), which network
// file systems know too.
std::shared_ptr<const void> lock(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  struct flock whole {};
  whole.l_type = F_WRLCK, whole.l_whence = SEEK_SET;
  if (file >= 0 && ::fcntl(file, F_OFD_SETLK, &whole) == 0)
    return {nullptr, [file](const void*) { ::close(file); }};
  const int error = errno;
  if (file >= 0) ::close(file);
  if (error == EAGAIN || error == EACCES)
    throw UsageError(fmt::format(
        "{} is held: another job is writing to this run folder -> wait for its end or stop it, or choose "
        "another run_dir",
        path));
  log_warning("{}: cannot be locked ({}) -> make sure that no other job uses this run folder", path,
              std::strerror(error));
  return nullptr;
}

void prepare(RunFolder& folder, const std::string& resume) {
  if (holds_run(folder) && !continues(folder, resume))
    throw UsageError(fmt::format(
        "the run folder {} already holds a run{} -> continue it with --resume auto, or choose another "
        "run_dir, or "
        "remove the folder",
        folder.path, resume.empty() ? "" : fmt::format(", and {} is not one of its checkpoints", resume)));
  const auto create = [](const std::string& path) {
    std::error_code error;
    fs::create_directories(path, error);
    if (error)
      throw UsageError(fmt::format("cannot create {} ({}) -> check run_dir, its permissions and free space",
                                   path, error.message()));
  };
  create(folder.path);
  folder.lock = lock(folder.lock_file());
  std::error_code ignored;
  fs::remove_all(folder.status(), ignored);
  create(folder.status());
}

}  // namespace

bool is_run_folder(const RunFolder& folder) {
  std::error_code error;
  if (fs::exists(fs::path(folder.path) / kManifestFile, error)) return false;
  return fs::exists(folder.metrics(), error) || fs::exists(folder.checkpoints(), error) ||
         fs::exists(folder.status(), error);
}

fs::path resume_path(const std::string& resume) {
  const fs::path path = fs::absolute(resume).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

RunFolder open_run_folder(World& world, const Config& config, const std::string& resume) {
  require_one_config(world, write_config(config));
  require_one_resume(world, resume);
  RunFolder folder{config.run_dir};
  agree(world, "run folder", 0, [&] {
    if (world.rank() == 0) prepare(folder, resume);
    return std::string();
  });
  return folder;
}

void write_resolved_config(const RunFolder& folder, const Config& config) {
  write_durably(folder.resolved_config(), write_config(config));
}

}  // namespace strata
