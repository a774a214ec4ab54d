#include <fmt/format.h>

#include "commands/commands.h"
#include "config/load.h"
#include "train/plan.h"

namespace strata {

ExitCode dry_run_command(const RunArguments& arguments, int ranks) {
  const Config config = load_config(arguments.config, arguments.sets);
  const RunPlan plan = plan_run(config);
  if (ranks > 0) plan.mesh.require_world(ranks);
  fmt::print("{}\n{}", write_config(config), describe(config, plan));
  return ExitCode::done;
}

}  // namespace strata
