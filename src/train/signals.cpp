#include "train/signals.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>

namespace strata {
namespace {

// Handlers may touch nothing else.
std::atomic<int> g_received = 0;
static_assert(std::atomic<int>::is_always_lock_free);

constexpr std::array<int, 3> kSignals = {SIGTERM, SIGINT, SIGUSR1};

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int s : kSignals) sigaddset(&set, s);
  return set;
}

extern "C" void on_stop_signal(int signal) {
  if (signal == SIGINT && g_received != 0) {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
    return;
  }
  g_received = signal;
}

}  // namespace

StopSignals::StopSignals() {
  g_received = 0;
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;
  for (int s : kSignals) sigaction(s, &action, nullptr);
  const sigset_t stops = stop_signals();
  taker_ = std::thread([this, stops] {
    pthread_sigmask(SIG_UNBLOCK, &stops, nullptr);
    over_.get_future().wait();
  });
  pthread_sigmask(SIG_BLOCK, &stops, &before_);
}

StopSignals::~StopSignals() {
  over_.set_value();
  taker_.join();
  for (int s : kSignals) std::signal(s, SIG_DFL);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

bool StopSignals::received() const {
  // One that has come counts even before its taker has run.
  sigset_t pending;
  sigpending(&pending);
  return g_received != 0 ||
         std::any_of(kSignals.begin(), kSignals.end(), [&](int s) { return sigismember(&pending, s) == 1; });
}

}  // namespace strata
