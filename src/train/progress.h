#pragma once
#include <cstdint>
#include <optional>

namespace strata {

struct ProgressLine {
  std::int64_t step = 0, steps = 0;
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_second = 0;
  std::optional<double> mfu;
  double step_seconds = 0;
};

// One line a step for people, on stdout: redrawn in place on a terminal; elsewhere plain lines, at most one
// every few seconds, so that a log stays readable. Silent on every rank but 0.
class Progress {
 public:
  explicit Progress(bool enabled);
  void show(const ProgressLine& line);
  // Ends a redrawn line, before anything else is printed.
  void finish();

 private:
  bool enabled_, terminal_, drawn_ = false;
  double last_shown_ = -1e9;  // seconds on the steady clock
  // The time left is reckoned from all steps since the first that was shown, pauses for evaluation and
  // checkpoints included; for that first one from its own time.
  std::int64_t first_step_ = 0;
  double first_time_ = 0;
};

}  // namespace strata
