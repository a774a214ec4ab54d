#include "federation/plan.h"

#include <algorithm>

#include "federation/aggregator.h"
#include "federation/token_weights.h"
#include "sharding/layout.h"

namespace strata {
namespace {

constexpr int kMostLanes = 8;

void receive(ByteCounters& counters, const UnitSpec& unit, Collective collective, std::int64_t bytes) {
  auto& entry = counters.at(is_edge(unit) ? Traffic::edge : Traffic::training, collective);
  entry.received += bytes;
  ++entry.calls;
}

}  // namespace

int federation_lanes(const Fragments& fragments, const FederationOptions& options) {
  return options.schedule == FederationSchedule::streaming ? std::min(fragments.total_units(), kMostLanes)
                                                           : 1;
}

bool weighs_tokens(const Mesh& mesh, const FederationOptions& options) {
  return options.token_weights && mesh.federate() > 1;
}

MemoryPlan federation_memory(const std::vector<UnitSpec>& units, const Mesh& mesh, const Precision& precision,
                             const FederationOptions& given) {
  const FederationOptions options = effective_options(given, mesh);
  const AggregationKind kind = aggregation_kind(mesh, precision, options);
  const Fragments fragments(units, options);
  MemoryPlan plan{};
  std::int64_t bytes = 0, largest = 0;
  if (weighs_tokens(mesh, options))
    bytes += static_cast<std::int64_t>(token_weights_bytes(mesh.federate(), fragments.count()));

  if (!kind.identity && !kind.parameters) {
    const bool streaming = options.schedule == FederationSchedule::streaming;
    const bool quantized = options.wire == DType::i8;
    const int kept = 1 + (options.rule != OuterRule::fedavg ? 1 : 0) + (quantized ? 1 : 0);
    for (const auto& unit : units) {
      const std::int64_t count = shard_elements(unit, mesh.shard());
      largest = std::max(largest, count);
      bytes += 4 * count * (kept + (streaming ? 1 : 0));
    }
    std::int64_t lane = (streaming ? 0 : 4 * largest) + (options.wire == DType::bf16 ? 2 * largest : 0);
    if (quantized) lane += quantized_bytes(largest) * (1 + mesh.federate());
    if (options.offload) lane += 4 * largest * kept;
    bytes += lane * federation_lanes(fragments, options);
  }
  plan[static_cast<int>(Purpose::outer)] = static_cast<std::size_t>(bytes);
  return plan;
}

BytePlan plan_federation_bytes(const std::vector<UnitSpec>& units, const Mesh& mesh, int position,
                               const Precision& precision, const FederationOptions& options,
                               std::int64_t step) {
  const AggregationKind kind = aggregation_kind(mesh, precision, options);
  BytePlan plan;
  if (kind.identity || mesh.federate() == 1) return plan;
  const Fragments fragments(units, options);
  const MeshCoordinates at = mesh.coordinates(position);
  const int F = mesh.federate();
  const bool sender = !kind.broadcasts || mesh.sender_replica(at.shard) == at.replicate;
  const bool streaming = options.schedule == FederationSchedule::streaming;

  for (int p = 0; p < fragments.count(); ++p) {
    const bool sent = fragments.sent(p, step);
    const bool at_once = !streaming || options.tau == 0 || step == options.last_step;
    const int shared = (sent && at_once ? 1 : 0) + (streaming && fragments.applied(p, step) ? 1 : 0);
    for (const int u : fragments.units(p)) {
      const UnitSpec& unit = units[static_cast<std::size_t>(u)];
      const std::int64_t count = shard_elements(unit, mesh.shard());
      if (sent && sender) {
        if (kind.reduced == DType::i8)
          receive(plan.federate, unit, Collective::all_gather, (F - 1) * quantized_bytes(count));
        else
          receive(plan.federate, unit, Collective::all_reduce,
                  all_reduce_bytes(count, kind.reduced, F, at.federate));
      }
      for (int i = 0; i < shared && kind.broadcasts; ++i)
        receive(plan.replicate, unit, Collective::broadcast,
                sender ? 0 : count * static_cast<std::int64_t>(size_of(kind.broadcast)));
    }
  }
  return plan;
}

}  // namespace strata
