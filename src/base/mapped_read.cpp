#include "base/mapped_read.h"

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstring>

namespace strata {
namespace {

// Where this thread's copy resumes when a page is missing; null outside of one. A handler can be told in no
// other way.
thread_local sigjmp_buf* volatile t_resume = nullptr;
struct sigaction g_before;

extern "C" void on_bus_error(int signal, siginfo_t* info, void* context) {
  if (t_resume != nullptr) siglongjmp(*t_resume, 1);
  if ((g_before.sa_flags & SA_SIGINFO) != 0) {
    g_before.sa_sigaction(signal, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(signal);
  } else {
    std::signal(signal, SIG_DFL);  // returning repeats the access, which then ends the process
  }
}

bool install() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  // The handler is left by a jump, so the signal must not stay blocked.
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGBUS, &action, &g_before) == 0;
}

}  // namespace

bool copy_from_mapping(void* to, const void* from, std::size_t bytes) {
  [[maybe_unused]] static const bool installed = install();
  sigjmp_buf resume;
  const bool complete = sigsetjmp(resume, 0) == 0;
  if (complete) {
    t_resume = &resume;
    // The compiler does not see that the handler runs within the copy.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::memcpy(to, from, bytes);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  t_resume = nullptr;
  return complete;
}

}  // namespace strata
