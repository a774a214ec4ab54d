#include "commands/ranks.h"

#include <unistd.h>

#include <chrono>
#include <exception>
#include <thread>

#include "base/log.h"

namespace strata {

ExitCode run_on_ranks(const std::function<ExitCode(MpiSession&)>& body) {
  MpiSession session;
  const auto leave = [&session](ExitCode code, const char* message) {
    if (session.size() > 1) session.leave(static_cast<int>(code), message);
    log_error("{}", message);
    return code;
  };
  // Errors are caught while the session lives: the other ranks must be ended through it.
  try {
    configure_log(session.rank(), "");
    return body(session);
  } catch (const Error& e) {
    return leave(e.code(), e.what());
  } catch (const std::exception& e) {
    return leave(ExitCode::failure, e.what());
  }
}

ExitCode refuse_on_ranks(const UsageError& refusal) {
  // MPI starts only where all ranks start it, and another one's command line may be one without MPI.
  std::thread([message = std::string(refusal.what())] {
    std::this_thread::sleep_for(std::chrono::seconds(10));
    log_error("{}", message);
    ::_exit(static_cast<int>(ExitCode::usage));
  }).detach();
  return run_on_ranks([&refusal](MpiSession&) -> ExitCode { throw refusal; });
}

}  // namespace strata
