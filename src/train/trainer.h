#pragma once
// The training run: one step reads top to bottom in Trainer::step.
#include <string>

#include "backend/mpi/session.h"
#include "base/error.h"
#include "config/config.h"

namespace strata {

struct TrainOptions {
  Config config;
  std::string
      resume;  // "": start anew; "auto": the run folder's newest checkpoint, if any; else a checkpoint folder
};

// Trains to schedule.steps, or until a signal asks for a stop. Every rank calls it. Returns done or stopped;
// throws the exceptions of base/error.h.
ExitCode run_training(const TrainOptions& options, MpiSession& session);

}  // namespace strata
