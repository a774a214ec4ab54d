#pragma once
// The program's commands, a file each. Each returns the exit code or throws the exceptions of base/error.h.
#include <string>
#include <vector>

#include "base/error.h"

namespace strata {

struct RunArguments {
  std::string config;             // file
  std::vector<std::string> sets;  // "a.b.c=value"
  std::string resume;             // "", "auto", a checkpoint's folder or a run's
};

// Trains. Every rank calls it; ends the other ranks with the error's own code when this one fails.
ExitCode train_command(const RunArguments& arguments);
// Prints the resolved configuration and the plan of the run. With `ranks` > 0, refuses a mesh that does not
// fill them.
ExitCode dry_run_command(const RunArguments& arguments, int ranks);
// Prints what a checkpoint holds, or how a run stands. With `verify`, compares every byte of a checkpoint
// with its checksums.
ExitCode inspect_command(const std::string& path, bool verify);
// Prints the table of keys as Markdown.
ExitCode config_reference_command();

}  // namespace strata
