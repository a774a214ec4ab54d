#pragma once
// What the federation allocates and moves, computed without a device.
#include <cstdint>
#include <vector>

#include "federation/fragments.h"
#include "federation/options.h"
#include "sharding/plan.h"

namespace strata {

// Streams that aggregate side by side. Streaming deals its units out to several: collectives start in the
// order of their enqueuing, and one that waits for its predecessor on the same stream would hold back the
// gathers enqueued after it.
int federation_lanes(const Fragments& fragments, const FederationOptions& options);

bool weighs_tokens(const Mesh& mesh, const FederationOptions& options);

// Bytes of outer state and aggregation buffers on one rank, host memory of `offload` included; nothing when
// the rule is the identity.
MemoryPlan federation_memory(const std::vector<UnitSpec>& units, const Mesh& mesh, const Precision& precision,
                             const FederationOptions& options);

// What the aggregation after `step` moves at `position`, in addition to plan_step_bytes. Broadcasts of
// streaming fragments count where they are applied.
BytePlan plan_federation_bytes(const std::vector<UnitSpec>& units, const Mesh& mesh, int position,
                               const Precision& precision, const FederationOptions& options,
                               std::int64_t step);

}  // namespace strata
