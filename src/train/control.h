#pragma once
// The control plane: one small world all-gather a step, enqueued behind the step and consumed one step later,
// so that neither metrics nor stop requests put the world's slowest link, or a wait of the host, into a step.
#include <cstdint>
#include <vector>

#include "backend/communicator.h"
#include "backend/device.h"
#include "backend/ops.h"
#include "sharding/mesh.h"

namespace strata {

// What one rank tells the world of a step. Lies in device memory; moved as four fp64 elements.
struct RankReport {
  double loss_sum = 0;  // of this rank's target tokens
  double tokens = 0;    // target tokens of this rank
  StepScale scale;      // gradient norm and finiteness of this rank's federation group
  std::int32_t stop = 0;
};
static_assert(sizeof(RankReport) == 4 * sizeof(double));

// What the world knows of a step.
struct WorldStep {
  double loss = 0;                  // token-weighted mean
  double perplexity_rank_mean = 0;  // mean of exp(local mean loss) over the ranks that have target tokens
  std::int64_t tokens = 0;
  double grad_norm_mean = 0, grad_norm_max = 0;  // over federation groups
  std::vector<int> non_finite_ranks;             // whose loss, or whose group's gradient, is not finite
  bool stop_requested = false;
};

// Reports in world-rank order to what the world knows. Every rank of a group reports the same norm.
WorldStep summarize(const std::vector<RankReport>& reports);

class ControlPlane {
 public:
  ControlPlane(Device& device, Communicator& world);
  // Exchanges the reports once `compute` has come this far. `mine` (device memory) must keep its value until
  // finish(). At most one exchange is pending.
  void start(Stream& compute, std::int64_t step, const RankReport* mine);
  bool pending() const { return pending_; }
  WorldStep finish();

 private:
  Device& device_;
  Communicator& world_;
  Stream& stream_;
  Buffer all_, all_host_;  // RankReport by world rank
  Event done_;
  bool pending_ = false;
};

}  // namespace strata
