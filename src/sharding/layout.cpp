#include "sharding/layout.h"

#include <algorithm>

namespace strata {

std::int64_t shard_elements(const UnitSpec& unit, int shards) {
  const std::int64_t granule = shards * kShardAlignment;
  return (unit.elements + granule - 1) / granule * kShardAlignment;
}

std::vector<ShardSegment> shard_segments(const UnitSpec& unit, int shards, int shard) {
  const std::int64_t count = shard_elements(unit, shards);
  const std::int64_t begin = shard * count, end = begin + count;
  std::vector<ShardSegment> segments;
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    const ParameterSpec& p = unit.parameters[i];
    const std::int64_t from = std::max(begin, p.offset), to = std::min(end, p.offset + p.count);
    if (from < to) segments.push_back({static_cast<int>(i), from - begin, to - from, from - p.offset});
  }
  return segments;
}

}  // namespace strata
