#include <fmt/format.h>

#include "commands/commands.h"
#include "config/keys.h"

namespace strata {

ExitCode config_reference_command() {
  fmt::print("{}", config_reference());
  return ExitCode::done;
}

}  // namespace strata
