#include "commands/ranks.h"

#include <exception>

#include "base/log.h"

namespace strata {

ExitCode run_on_ranks(const std::function<ExitCode(MpiSession&)>& body) {
  MpiSession session;
  const auto leave = [&session](ExitCode code, const char* message) {
    log_error("{}", message);
    if (session.size() > 1) MpiSession::abort(static_cast<int>(code));
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

}  // namespace strata
