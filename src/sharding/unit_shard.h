#pragma once
// What one rank stores of one unit: 1/S of its flat buffer, of its gradient and of the optimizer's moments.
#include <cstdint>
#include <vector>

#include "backend/device.h"
#include "backend/tensor.h"
#include "backend/units.h"

namespace strata {

// The part of one parameter that lies in this rank's shard.
struct ShardSegment {
  int parameter = 0;       // index into UnitSpec::parameters
  std::int64_t begin = 0;  // first element within the shard
  std::int64_t count = 0;
  std::int64_t first_element = 0;  // index of that element within the parameter
};

// All flats hold `count` elements; what lies past the unit's end (padding) is zero and stays zero.
struct UnitShard {
  const UnitSpec* spec = nullptr;
  std::int64_t count = 0;  // padded unit elements / S
  std::vector<ShardSegment> segments;
  Flat parameter;  // fp32 master, or the bf16 parameter itself (bf16_pure)
  Flat compute;    // bf16 copy that is gathered; empty when `parameter` itself is
  Flat gradient;   // sum over the group's tokens so far; fp32, or bf16 (bf16_pure)
  Flat m, v;       // AdamW moments; empty for SGD
  Event ready;     // the next gather of this unit waits for it (optimizer, aggregation)
  Flat gathered() const { return compute ? compute : parameter; }
};

}  // namespace strata
