#include "sharding/layout.h"

#include "tests/support/catch.h"
#include "tests/support/units.h"

using namespace strata;

TEST_CASE("shards cover every element of a unit exactly once, for any shard size") {
  for (const std::int64_t first : {8, 24, 1000, 997 * 8}) {
    const UnitSpec unit = make_unit("decoder.0", UnitKind::decoder, {first, 16, 8, 336});
    for (const int shards : {1, 2, 3, 5, 7, 16}) {
      const std::int64_t count = shard_elements(unit, shards);
      REQUIRE(count % kShardAlignment == 0);
      REQUIRE(count * shards >= unit.elements);
      REQUIRE((count - kShardAlignment) * shards < unit.elements);

      std::vector<int> seen(static_cast<std::size_t>(unit.elements), 0);
      for (int s = 0; s < shards; ++s)
        for (const auto& segment : shard_segments(unit, shards, s)) {
          const auto& p = unit.parameters[static_cast<std::size_t>(segment.parameter)];
          REQUIRE(segment.count > 0);
          REQUIRE(segment.begin + segment.count <= count);
          REQUIRE(segment.first_element + segment.count <= p.count);
          for (std::int64_t i = 0; i < segment.count; ++i) {
            const std::int64_t in_unit = p.offset + segment.first_element + i;
            REQUIRE(in_unit == s * count + segment.begin + i);
            ++seen[static_cast<std::size_t>(in_unit)];
          }
        }
      REQUIRE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
    }
  }
}

TEST_CASE("a shard past the end of a small unit is all padding") {
  const UnitSpec unit = make_unit("decoder.0", UnitKind::decoder, {16, 8});
  CHECK(shard_elements(unit, 16) == 8);
  CHECK(shard_segments(unit, 16, 2).size() == 1);
  for (int s = 3; s < 16; ++s) CHECK(shard_segments(unit, 16, s).empty());
}
