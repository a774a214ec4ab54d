#pragma once
// What a run will need and move, by arithmetic alone: nothing is allocated and no rank is started.
#include <cstddef>
#include <optional>
#include <string>

#include "checkpoint/save.h"
#include "config/config.h"
#include "model/activations.h"
#include "sharding/mesh.h"
#include "sharding/plan.h"
#include "train/batches.h"

namespace strata {

// How the configuration sets up the model and who reads which sequences; the trainer uses the same.
LlamaSetup llama_setup(const Config& config);
BatchShape batch_shape(const Config& config, const Mesh& mesh, int position);

struct RunPlan {
  Mesh mesh;
  std::int64_t parameters = 0;
  std::int64_t tokens_per_step = 0;  // over the world
  MemoryPlan memory{};               // one rank, bytes by purpose
  ActivationPlan activations{};
  bool knows_operations = false;  // scratch of operations and collectives is part of the workspace (cpu only)
  BytePlan step{};                // received by rank 0 in a step that does not aggregate
  BytePlan aggregation{};         // in addition, in the first step that does
  std::int64_t aggregation_step = 0;
  CheckpointBytes checkpoint{};  // on disk, over all ranks
};

// Throws UsageError for what no run could use.
RunPlan plan_run(const Config& config);

// The plan as text for people.
std::string describe(const Config& config, const RunPlan& plan);

}  // namespace strata
