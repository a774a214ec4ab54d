#pragma once
// What the two halves of the engine share.
#include <vector>

#include "backend/ops.h"
#include "backend/units.h"
#include "sharding/layout.h"
#include "sharding/mesh.h"
#include "sharding/options.h"
#include "sharding/plan.h"
#include "sharding/unit_shard.h"

namespace strata {

struct EngineParts {
  const std::vector<UnitSpec>& units;
  std::vector<UnitShard>& shards;
  const MeshGroups& groups;
  Device& device;
  Ops& ops;
  Stream& compute;
  const EngineOptions& options;
  BufferPlan buffers;

  const UnitSpec& unit(int u) const { return units[static_cast<std::size_t>(u)]; }
  UnitShard& shard(int u) const { return shards[static_cast<std::size_t>(u)]; }
  bool edge(int u) const { return is_edge(unit(u)); }
  int shard_count() const { return groups.mesh.shard(); }
  int replicas() const { return groups.mesh.replicate(); }
  std::int64_t padded(int u) const { return shard(u).count * shard_count(); }
  Traffic traffic(int u) const { return edge(u) ? Traffic::edge : Traffic::training; }
};

}  // namespace strata
