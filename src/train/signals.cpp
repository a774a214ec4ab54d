#include "train/signals.h"

#include <array>
#include <csignal>

namespace strata {
namespace {

// Handlers may touch nothing else.
volatile std::sig_atomic_t g_received = 0;

constexpr std::array<int, 3> kSignals = {SIGTERM, SIGINT, SIGUSR1};

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
}

StopSignals::~StopSignals() {
  for (int s : kSignals) std::signal(s, SIG_DFL);
}

int StopSignals::received() const {
  return g_received;
}

}  // namespace strata
