#include "train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>

namespace strata {
namespace {

constexpr double kSecondsBetweenPlainLines = 5;

std::string duration(double seconds) {
  const auto s = static_cast<long>(std::lround(std::max(0.0, seconds)));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

}  // namespace

Progress::Progress(bool enabled) : enabled_(enabled), terminal_(isatty(STDOUT_FILENO) == 1) {}

void Progress::show(const ProgressLine& l) {
  if (!enabled_) return;
  const double now =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (first_step_ == 0) first_step_ = l.step, first_time_ = now;
  const bool edge = l.step == 1 || l.step == l.steps;
  if (!edge && now - last_shown_ < (terminal_ ? 0.1 : kSecondsBetweenPlainLines)) return;
  last_shown_ = now;
  const auto taken = static_cast<double>(l.step - first_step_);
  const double per_step = taken > 0 ? (now - first_time_) / taken : l.step_seconds;
  const std::string text = fmt::format(
      "step {}/{}  loss {:.4f}  perplexity {:.2f}  lr {:.3g}  norm {:.3f}  {:.0f} tokens/s  MFU {}  ETA {}",
      l.step, l.steps, l.loss, std::exp(l.loss), l.lr, l.grad_norm, l.tokens_per_second,
      l.mfu ? fmt::format("{:.1f}%", 100 * *l.mfu) : "n/a",
      duration(per_step * static_cast<double>(l.steps - l.step)));
  if (terminal_) {
    fmt::print("\r\033[K{}", text);
    drawn_ = true;
  } else {
    fmt::print("{}\n", text);
  }
  std::fflush(stdout);
}

void Progress::finish() {
  if (drawn_) fmt::print("\n");
  drawn_ = false;
  std::fflush(stdout);
}

}  // namespace strata
