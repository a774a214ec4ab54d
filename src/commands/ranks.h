#pragma once
// How a command runs on all ranks.
#include <functional>

#include "backend/mpi/session.h"
#include "base/error.h"

namespace strata {

// Runs `body` on every rank; what it throws is logged, once where all ranks throw the same, and ends the
// other ranks with the error's own code.
ExitCode run_on_ranks(const std::function<ExitCode(MpiSession&)>& body);

// Refuses the command line: says so once for all ranks that were started with it.
ExitCode refuse_on_ranks(const UsageError& refusal);

}  // namespace strata
