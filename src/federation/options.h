#pragma once
// When and how federation groups aggregate, resolved from the configuration.
#include <cstdint>

#include "backend/communicator.h"
#include "backend/ops.h"
#include "config/config.h"

namespace strata {

enum class FederationSchedule : std::uint8_t { blocking, overlap, streaming };

struct FederationOptions {
  std::int64_t every = 8;      // A
  std::int64_t last_step = 0;  // the run's last step aggregates, too
  OuterRule rule = OuterRule::fedavg;
  FederationSchedule schedule = FederationSchedule::blocking;
  bool one_replica = false;    // one replica all-reduces and broadcasts inside its group
  bool token_weights = false;  // weights by tokens since the last aggregation
  double eta = 1, momentum = 0;
  double alpha = 0;      // streaming: share of the local parameters that is kept
  std::int64_t tau = 1;  // streaming: steps between sending and applying
  std::int64_t fragment_layers = 3;
  DType wire = DType::f32;  // f32, bf16, i8
  bool offload = false;     // outer state in host memory
  ReduceOptions reduce;

  // Defaults by rule: fedavg eta 1; fedavgm eta 1, momentum 0.9; fedmom and diloco eta 0.7, momentum 0.9 (eta
  // 0.4 when streaming); alpha 0.5 when streaming. Throws UsageError naming the key for values a rule or
  // schedule cannot use.
  static FederationOptions from(const Config& config);
};

}  // namespace strata
