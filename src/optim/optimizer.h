#pragma once
// The inner optimizer: norm, clipping and AdamW or SGD on the shards, unit by unit on the compute stream.
#include <cstdint>

#include "backend/ops.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"

namespace strata {

struct OptimizerOptions {
  bool adamw = true;  // false: SGD without momentum
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  bool decay_norms = false;
  bool stochastic_rounding = false;
  double clip = 1.0;  // 0: none
  std::uint64_t seed = 42;

  static OptimizerOptions from(const Config& config);
};

class Optimizer {
 public:
  // Throws UsageError for stochastic rounding of fp32 parameters.
  Optimizer(ShardingEngine& engine, const MeshGroups& groups, Device& device, Ops& ops, Stream& compute,
            const OptimizerOptions& options);

  // Enqueues the step after engine.finish_gradients(). local_tokens: target tokens of this rank in this step,
  // all micro-steps, one fp64 in device memory, complete on the compute stream. The norm is the federation
  // group's: sums of squares and tokens are added over its ranks in one small all-reduce (Traffic::control).
  // Non-finite gradients leave weights and moments untouched.
  void step(std::int64_t step, double lr, const double* local_tokens);

  // In device memory, valid on the compute stream after step(): norm and finite of this rank's group.
  const StepScale* scale() const { return scale_.as<StepScale>(); }
  // {sum of squares of the summed gradient, target tokens} of the federation group.
  const double* group_sums() const { return sums_.as<double>(); }

 private:
  void update(UnitShard& shard, std::int64_t step, double lr);

  ShardingEngine& engine_;
  const MeshGroups& groups_;
  Device& device_;
  Ops& ops_;
  Stream& compute_;
  Stream& control_;
  OptimizerOptions options_;
  Buffer sums_, scale_;
};

}  // namespace strata
