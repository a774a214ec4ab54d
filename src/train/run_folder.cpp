#include "train/run_folder.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
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
  const std::vector<std::string> all = world.gather_strings(resolved);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw UsageError(
        fmt::format("rank {} has another configuration than rank 0: {} -> start every rank with the same "
                    "--config and --set",
                    rank, first_difference(all[rank], all[0])));
  }
}

// What goes wrong on rank 0 must reach every rank: returns the message, empty when all is well.
std::string prepare(const RunFolder& folder, const std::string& resolved, bool resuming) {
  std::error_code error;
  if (!resuming && fs::exists(folder.metrics(), error)) {
    return fmt::format(
        "the run folder {} already holds a run -> continue it with --resume auto, or choose another "
        "run_dir, or remove the folder",
        folder.path);
  }
  fs::create_directories(folder.path, error);
  std::ofstream out(folder.resolved_config(), std::ios::trunc);
  out << resolved << '\n';
  out.close();
  if (!out)
    return fmt::format("cannot write {} -> check run_dir, its permissions and free space",
                       folder.resolved_config());
  return {};
}

}  // namespace

RunFolder open_run_folder(World& world, const Config& config, bool resuming) {
  const std::string resolved = write_config(config);
  require_one_config(world, resolved);
  const RunFolder folder{config.run_dir};
  const std::string message = world.rank() == 0 ? prepare(folder, resolved, resuming) : std::string();
  const std::string problem = world.gather_strings(message).at(0);
  if (!problem.empty()) throw UsageError(problem);
  return folder;
}

}  // namespace strata
