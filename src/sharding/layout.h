#pragma once
// Where a unit's elements lie: padding of its flat buffer, and which part of which parameter a shard holds.
#include <cstdint>
#include <vector>

#include "backend/units.h"
#include "sharding/unit_shard.h"

namespace strata {

// Every shard is a multiple of this many elements: 16 bytes of bf16.
constexpr std::int64_t kShardAlignment = 8;

// Elements of one of `shards` equal parts of a unit, padding included.
std::int64_t shard_elements(const UnitSpec& unit, int shards);
inline std::int64_t padded_elements(const UnitSpec& unit, int shards) {
  return shard_elements(unit, shards) * shards;
}

// The parts of the unit's parameters within shard `shard`, in order; none where the shard is all padding.
std::vector<ShardSegment> shard_segments(const UnitSpec& unit, int shards, int shard);

// Units other than decoder layers: counted and buffered apart.
inline bool is_edge(const UnitSpec& unit) {
  return unit.kind != UnitKind::decoder;
}

}  // namespace strata
