#pragma once
#include <csignal>
#include <future>
#include <thread>

namespace strata {

// While it lives, SIGTERM, SIGINT and SIGUSR1 ask for a stop after the current step; a second SIGINT kills at
// once. One at a time in a process: signal handlers are process-wide.
//
// The calling thread, and the threads it starts from then on, take none of these signals: a thread made for
// it does. Threads that compute must never be interrupted by a handler: the AVX-512 sgemm of oneDNN 2.6 keeps
// data below its stack pointer, where the kernel puts a signal's frame, and then writes through what it finds
// there (seen with small m and n and k from 256 on: the heap was damaged). So make it before those threads.
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
