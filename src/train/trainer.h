#pragma once
// The training run: one step reads top to bottom in Trainer::step.
#include <string>

#include "backend/mpi/session.h"
#include "base/error.h"
#include "config/config.h"
#include "sharding/engine.h"

namespace strata {

// Looks into a run, for tests and studies. Called on every rank at the same points; may gather, which waits
// and costs time but changes nothing.
class TrainingObserver {
 public:
  virtual ~TrainingObserver() = default;
  virtual void initialized(ShardingEngine&, const MeshGroups&) {}
  // The gradients of `step` are reduced, the optimizer has not used them.
  virtual void reduced(std::int64_t /*step*/, ShardingEngine&) {}
  // All steps are done and nothing is under way.
  virtual void finished(ShardingEngine&, const MeshGroups&) {}
};

struct TrainOptions {
  Config config;
  std::string resume;  // "": start anew; "auto": the run folder's newest checkpoint, if any; else a
                       // checkpoint's folder, or a run's for its newest one
  TrainingObserver* observer = nullptr;
};

// Trains to schedule.steps, or until a signal asks for a stop. Every rank calls it. Returns done or stopped;
// throws the exceptions of base/error.h.
ExitCode run_training(const TrainOptions& options, MpiSession& session);

}  // namespace strata
