#pragma once
// The folder that holds a run's checkpoints: names, what is there, and making things durable. A folder is a
// checkpoint once it is called step_<number>; whatever is being written or was set aside has another name.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace strata {

// "step_00001000"
std::string checkpoint_name(std::int64_t step);

struct CheckpointFolder {
  std::int64_t step = 0;
  std::filesystem::path path;
};
// The checkpoints in `folder` (<run>/checkpoints), by step; none when it does not exist.
std::vector<CheckpointFolder> list_checkpoints(const std::filesystem::path& folder);

// The text of a checkpoint's manifest. Throws DataError when there is none.
std::string read_manifest_text(const std::filesystem::path& checkpoint);

// Shared file systems may show what another machine wrote a little late: waits up to a few seconds.
void await_visible(const std::filesystem::path& path);

// Writes a file whole: into <path>.partial, flushed to the disk, renamed. Throws DataError.
void write_durably(const std::filesystem::path& path, const std::string& text);
// Flushes a folder's list of names to the disk, so that renames in it last. Throws DataError.
void sync_folder(const std::filesystem::path& folder);
void sync_file(const std::filesystem::path& file);

// Renames a checkpoint to <name>.<why>, or <name>.<why>.2 and so on where one was set aside before. Returns
// the new path. Throws DataError.
std::filesystem::path set_aside(const std::filesystem::path& checkpoint, const std::string& why);

}  // namespace strata
