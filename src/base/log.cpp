#include "base/log.h"

#include <cstdio>
#include <memory>
#include <mutex>

namespace strata {
namespace {

struct Sink {
  std::mutex mutex;
  int rank = 0;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file{nullptr, std::fclose};
};

Sink& sink() {
  static Sink s;
  return s;
}

}  // namespace

void configure_log(int rank, const std::string& file) {
  Sink& s = sink();
  const std::lock_guard lock(s.mutex);
  s.rank = rank;
  s.file.reset(file.empty() ? nullptr : std::fopen(file.c_str(), "a"));
}

void log_line(LogLevel level, std::string_view text) {
  Sink& s = sink();
  const std::lock_guard lock(s.mutex);
  if (level == LogLevel::info && s.rank != 0) return;
  const char* prefix = level == LogLevel::error ? "error: " : level == LogLevel::warning ? "warning: " : "";
  const std::string line = s.rank == 0 ? fmt::format("{}{}\n", prefix, text)
                                       : fmt::format("[rank {}] {}{}\n", s.rank, prefix, text);
  std::fwrite(line.data(), 1, line.size(), stderr);
  if (s.file) {
    std::fwrite(line.data(), 1, line.size(), s.file.get());
    std::fflush(s.file.get());
  }
}

}  // namespace strata
