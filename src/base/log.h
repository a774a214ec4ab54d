#pragma once
// Log lines for people: to stderr and, once a run folder exists, to its log.txt. Only rank 0 prints info
// lines.
#include <fmt/format.h>

#include <string>
#include <string_view>

namespace strata {

enum class LogLevel { info, warning, error };

// Process-wide sink, set up once by the program's entry point: which rank this is and where log.txt lies (""
// for none).
void configure_log(int rank, const std::string& file);
void log_line(LogLevel level, std::string_view text);

template <class... A>
void log_info(fmt::format_string<A...> f, A&&... a) {
  log_line(LogLevel::info, fmt::format(f, std::forward<A>(a)...));
}
template <class... A>
void log_warning(fmt::format_string<A...> f, A&&... a) {
  log_line(LogLevel::warning, fmt::format(f, std::forward<A>(a)...));
}
template <class... A>
void log_error(fmt::format_string<A...> f, A&&... a) {
  log_line(LogLevel::error, fmt::format(f, std::forward<A>(a)...));
}

}  // namespace strata
