#pragma once
#include <csignal>
#include <future>
#include <thread>

namespace strata {

// While it lives, SIGTERM, SIGINT and SIGUSR1 ask for a stop after the current step; a second SIGINT kills at
// once. One at a time in a process: signal handlers are process-wide.
//
// The calling thread, and the threads it starts from then on, take none of these signals: a thread made for
// it does. So make it before the threads that compute. No handler may run on those: the fp32 GEMM kernels of
// oneDNN up to 3.11 point the stack pointer into a buffer of the heap, where the kernel then puts the
// signal's frame, over whatever lies before it (https://github.com/uxlfoundation/oneDNN/issues/4845).
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  // Whether one has come. For the thread that made this.
  bool received() const;

 private:
  sigset_t before_{};  // the calling thread's mask
  std::promise<void> over_;
  std::thread taker_;
};

}  // namespace strata
