#include "checkpoint/agree.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/error.h"

namespace strata {
namespace {

// First character of what is exchanged: a result, or an error's exit code and message.
constexpr char kResult = '=', kError = '!';

std::string attempt(const std::function<std::string()>& work) {
  const auto failed = [](ExitCode code, const char* what) {
    return fmt::format("{}{} {}", kError, static_cast<int>(code), what);
  };
  try {
    return kResult + work();
  } catch (const Error& e) {
    return failed(e.code(), e.what());
  } catch (const std::filesystem::filesystem_error& e) {
    return failed(ExitCode::data,
                  fmt::format("{} -> check the folder, its permissions and free space", e.what()).c_str());
  } catch (const std::exception& e) {
    return failed(ExitCode::failure, e.what());
  }
}

}  // namespace

std::vector<std::string> agree(World& world, const std::string& unit, std::int64_t step,
                               const std::function<std::string()>& work) {
  std::vector<std::string> all = world.gather_strings({Traffic::checkpoint, unit, step}, attempt(work));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == kResult) {
      all[rank].erase(0, 1);
      continue;
    }
    const std::size_t space = all[rank].find(' ');
    const auto code = static_cast<ExitCode>(std::stoi(all[rank].substr(1, space - 1)));
    const std::string what = all[rank].substr(space + 1);
    const std::string message = world.size() == 1 ? what : fmt::format("rank {}: {}", rank, what);
    if (code == ExitCode::data) throw DataError(message);
    throw Error(code, message);
  }
  return all;
}

}  // namespace strata
