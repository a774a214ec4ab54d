#include "commands/commands.h"
#include "commands/ranks.h"
#include "config/load.h"
#include "train/trainer.h"

namespace strata {

ExitCode train_command(const RunArguments& arguments) {
  return run_on_ranks([&arguments](MpiSession& session) {
    return run_training({load_config(arguments.config, arguments.sets), arguments.resume}, session);
  });
}

}  // namespace strata
