#include "checkpoint/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "checkpoint/manifest.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step_";

void sync_path(const fs::path& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC);
  const bool good = fd >= 0 && ::fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!good)
    throw DataError(fmt::format("{}: cannot be flushed to the disk ({}) -> check the disk and its free space",
                                path.string(), std::strerror(error)));
}

}  // namespace

std::string checkpoint_name(std::int64_t step) {
  return fmt::format("{}{:08}", kPrefix, step);
}

std::vector<CheckpointFolder> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointFolder> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::int64_t step = 0;
    const char* last = name.data() + name.size();
    const std::size_t digits = std::strlen(kPrefix);
    if (!name.starts_with(kPrefix)) continue;
    const auto [stop, code] = std::from_chars(name.data() + digits, last, step);
    if (code == std::errc() && stop == last && name == checkpoint_name(step))
      found.push_back({step, it->path()});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return found;
}

std::string read_manifest_text(const fs::path& checkpoint) {
  const fs::path path = checkpoint / kManifestFile;
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || !text)
    throw DataError(
        fmt::format("{}: cannot be read: {} is no checkpoint -> give a folder step_<number> of a run's "
                    "checkpoints, or the run's folder",
                    path.string(), checkpoint.string()));
  return text.str();
}

void await_visible(const fs::path& path) {
  constexpr int kTries = 20;
  std::error_code error;
  for (int i = 0; i < kTries && !fs::exists(path, error); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

void write_durably(const fs::path& path, const std::string& text) {
  const fs::path partial = path.string() + ".partial";
  std::ofstream out(partial, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out)
    throw DataError(fmt::format("{}: cannot be written -> check the folder's permissions and free space",
                                partial.string()));
  sync_file(partial);
  std::error_code error;
  fs::rename(partial, path, error);
  if (error)
    throw DataError(
        fmt::format("{}: cannot be renamed ({}) -> check the folder", partial.string(), error.message()));
}

void sync_folder(const fs::path& folder) {
  sync_path(folder, O_RDONLY | O_DIRECTORY);
}

void sync_file(const fs::path& file) {
  sync_path(file, O_RDONLY);
}

fs::path set_aside(const fs::path& checkpoint, const std::string& why) {
  const std::string name = checkpoint.string() + "." + why;
  fs::path to = name;
  std::error_code error;
  for (int n = 2; fs::exists(to, error); ++n) to = fmt::format("{}.{}", name, n);
  fs::rename(checkpoint, to, error);
  if (error)
    throw DataError(fmt::format("{}: cannot be renamed to {} ({}) -> check the folder's permissions",
                                checkpoint.string(), to.filename().string(), error.message()));
  sync_folder(checkpoint.parent_path());
  return to;
}

}  // namespace strata
