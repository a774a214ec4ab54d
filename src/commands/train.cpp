#include <exception>

#include "base/log.h"
#include "commands/commands.h"
#include "config/load.h"
#include "train/trainer.h"

namespace strata {
namespace {

ExitCode leave(const MpiSession& session, ExitCode code, const std::string& message) {
  log_error("{}", message);
  if (session.size() > 1) session.abort(static_cast<int>(code));
  return code;
}

}  // namespace

ExitCode train_command(const RunArguments& arguments) {
  MpiSession session;
  // Errors are caught while the session lives: the other ranks must be ended through it.
  try {
    return run_training({load_config(arguments.config, arguments.sets), arguments.resume}, session);
  } catch (const Error& e) {
    return leave(session, e.code(), e.what());
  } catch (const std::exception& e) {
    return leave(session, ExitCode::failure, e.what());
  }
}

}  // namespace strata
