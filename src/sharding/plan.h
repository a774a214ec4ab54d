#pragma once
// What the engine will allocate and move, computed without a device: the dry run prints it, the tests hold
// the byte counters and the memory accounts against it.
#include <array>
#include <cstddef>
#include <vector>

#include "backend/communicator.h"
#include "backend/device.h"
#include "backend/units.h"
#include "sharding/mesh.h"
#include "sharding/options.h"

namespace strata {

using MemoryPlan = std::array<std::size_t, kPurposes>;  // bytes by Purpose

// The engine's buffers beside the shards. Elements are the capacity of one buffer, 0 where there is none.
struct BufferPlan {
  int weight_slots = 0;  // for decoder units, in the compute dtype; edge units share one of their own
  std::int64_t weight_slot_elements = 0, edge_weight_slot_elements = 0;
  int gradient_slots = 0;  // for decoder units; edge units share one; `accumulate_full`: one a unit instead
  std::int64_t gradient_slot_elements = 0, edge_gradient_slot_elements = 0;
  DType gradient_slot_dtype = DType::f32;
  std::int64_t reduced_elements = 0;  // a reduced shard on its way into the accumulator
  DType reduced_dtype = DType::f32;
  std::int64_t wire_elements = 0;          // accumulate_full: a full gradient cast for the wire
  std::int64_t replica_wire_elements = 0;  // a gradient shard cast for the wire
};
BufferPlan plan_buffers(const std::vector<UnitSpec>& units, const Mesh& mesh, const EngineOptions& options);

// Bytes that a ShardingEngine allocates on one rank. The same for all ranks.
MemoryPlan engine_memory(const std::vector<UnitSpec>& units, const Mesh& mesh, const EngineOptions& options);

// Bytes and calls of one rank by group; of each entry only `received` and `calls` are planned.
struct BytePlan {
  ByteCounters shard, replicate, federate;
  BytePlan& operator+=(const BytePlan& other);
};

// What collectives of `count` elements receive at place `rank` of a group of `size`. An all-reduce cuts the
// buffer in `size` chunks, the first (count mod size) of them one element longer: a rank receives its own
// chunk from every other rank, and then everyone else's chunk.
std::int64_t all_gather_bytes(std::int64_t shard_count, DType dtype, int size);
std::int64_t reduce_scatter_bytes(std::int64_t shard_count, DType dtype, int size);
std::int64_t all_reduce_bytes(std::int64_t count, DType dtype, int size, int rank);

// One optimizer step without aggregation: K (2 all-gathers + reduce-scatter) + all-reduce for each decoder
// unit (Traffic::training), one gather less for edge units (Traffic::edge).
BytePlan plan_step_bytes(const std::vector<UnitSpec>& units, const Mesh& mesh, int position,
                         const EngineOptions& options);
// One forward pass of evaluation (Traffic::evaluation).
BytePlan plan_evaluation_bytes(const std::vector<UnitSpec>& units, const Mesh& mesh,
                               const EngineOptions& options);

}  // namespace strata
