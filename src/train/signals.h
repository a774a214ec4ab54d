#pragma once

namespace strata {

// While it lives, SIGTERM, SIGINT and SIGUSR1 ask for a stop after the current step; a second SIGINT kills at
// once. One at a time in a process: signal handlers are process-wide.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  // The signal that asked for a stop, 0 for none.
  int received() const;
};

}  // namespace strata
