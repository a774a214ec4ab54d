#include "sharding/plan.h"

#include <algorithm>

#include "sharding/layout.h"

namespace strata {
namespace {

// While one slot is computed into, the other is reduced from.
constexpr int kGradientSlots = 2;

std::size_t bytes(std::int64_t elements, DType dtype) {
  return static_cast<std::size_t>(elements) * size_of(dtype);
}

void receive(ByteCounters& counters, Traffic traffic, Collective collective, std::int64_t received) {
  auto& entry = counters.at(traffic, collective);
  entry.received += received;
  ++entry.calls;
}

void add(ByteCounters& sum, const ByteCounters& other) {
  for (std::size_t t = 0; t < sum.entries.size(); ++t)
    for (std::size_t c = 0; c < sum.entries[t].size(); ++c) {
      sum.entries[t][c].received += other.entries[t][c].received;
      sum.entries[t][c].sent += other.entries[t][c].sent;
      sum.entries[t][c].calls += other.entries[t][c].calls;
    }
}

}  // namespace

BufferPlan plan_buffers(const std::vector<UnitSpec>& units, const Mesh& mesh, const EngineOptions& options) {
  const Precision& p = options.precision;
  const int S = mesh.shard();
  int decoders = 0;
  std::int64_t decoder = 0, edge = 0, shard = 0;
  for (const auto& unit : units) {
    decoders += is_edge(unit) ? 0 : 1;
    auto& largest = is_edge(unit) ? edge : decoder;
    largest = std::max(largest, padded_elements(unit, S));
    shard = std::max(shard, shard_elements(unit, S));
  }

  BufferPlan b;
  if (mesh.replicate() > 1 && p.gradient != p.wire) b.replica_wire_elements = shard;
  if (S == 1) return b;

  b.weight_slots = options.reshard_after_forward ? std::min(options.prefetch + 1, decoders) : decoders;
  b.weight_slot_elements = decoder;
  b.edge_weight_slot_elements = edge;
  b.gradient_slots = std::min(kGradientSlots, decoders);
  b.gradient_slot_elements = decoder;
  b.edge_gradient_slot_elements = edge;
  b.gradient_slot_dtype = options.accumulate_full ? p.gradient : p.wire;

  // A reduce-scatter writes fp32 shards from either wire, but no bf16 shard from an fp32 wire.
  const bool direct = p.gradient == DType::f32 || p.wire == DType::bf16;
  const bool adds = options.micro_steps > 1 && !options.accumulate_full;
  if (!direct || adds) b.reduced_elements = shard;
  b.reduced_dtype = p.gradient == DType::f32 || p.wire == DType::f32 ? DType::f32 : DType::bf16;
  if (options.accumulate_full && p.gradient != p.wire) b.wire_elements = std::max(decoder, edge);
  return b;
}

MemoryPlan engine_memory(const std::vector<UnitSpec>& units, const Mesh& mesh, const EngineOptions& options) {
  const Precision& p = options.precision;
  const BufferPlan b = plan_buffers(units, mesh, options);
  MemoryPlan plan{};
  auto& weights = plan[static_cast<int>(Purpose::weights)];
  auto& gradients = plan[static_cast<int>(Purpose::gradients)];
  auto& moments = plan[static_cast<int>(Purpose::moments)];
  auto& workspace = plan[static_cast<int>(Purpose::workspace)];

  for (const auto& unit : units) {
    const std::int64_t count = shard_elements(unit, mesh.shard());
    weights += bytes(count, p.master) + (p.has_compute_copy() ? bytes(count, p.compute) : 0);
    gradients += bytes(count, p.gradient);
    if (options.moments) moments += 2 * bytes(count, p.master);
    if (mesh.shard() > 1 && options.accumulate_full)
      gradients += bytes(padded_elements(unit, mesh.shard()), p.gradient);
  }
  weights += static_cast<std::size_t>(b.weight_slots) * bytes(b.weight_slot_elements, p.compute) +
             bytes(b.edge_weight_slot_elements, p.compute);
  if (!options.accumulate_full)
    gradients +=
        static_cast<std::size_t>(b.gradient_slots) * bytes(b.gradient_slot_elements, b.gradient_slot_dtype) +
        bytes(b.edge_gradient_slot_elements, b.gradient_slot_dtype);
  workspace += bytes(b.reduced_elements, b.reduced_dtype) + bytes(b.wire_elements, p.wire) +
               bytes(b.replica_wire_elements, p.wire);
  return plan;
}

BytePlan& BytePlan::operator+=(const BytePlan& other) {
  add(shard, other.shard);
  add(replicate, other.replicate);
  add(federate, other.federate);
  return *this;
}

std::int64_t all_gather_bytes(std::int64_t shard_count, DType dtype, int size) {
  return (size - 1) * shard_count * static_cast<std::int64_t>(size_of(dtype));
}

std::int64_t reduce_scatter_bytes(std::int64_t shard_count, DType dtype, int size) {
  return all_gather_bytes(shard_count, dtype, size);
}

std::int64_t all_reduce_bytes(std::int64_t count, DType dtype, int size, int rank) {
  const std::int64_t own = count / size + (rank < count % size ? 1 : 0);
  return ((size - 1) * own + (count - own)) * static_cast<std::int64_t>(size_of(dtype));
}

BytePlan plan_step_bytes(const std::vector<UnitSpec>& units, const Mesh& mesh, int position,
                         const EngineOptions& options) {
  const Precision& p = options.precision;
  const int S = mesh.shard(), R = mesh.replicate(), replica = mesh.coordinates(position).replicate;
  BytePlan plan;
  for (const auto& unit : units) {
    const std::int64_t count = shard_elements(unit, S);
    const Traffic traffic = is_edge(unit) ? Traffic::edge : Traffic::training;
    const int gathers = !is_edge(unit) && options.reshard_after_forward ? 2 : 1;
    for (int i = 0; i < gathers * options.micro_steps && S > 1; ++i)
      receive(plan.shard, traffic, Collective::all_gather, all_gather_bytes(count, p.compute, S));
    const int reductions = options.accumulate_full ? 1 : options.micro_steps;
    for (int i = 0; i < reductions && S > 1; ++i)
      receive(plan.shard, traffic, Collective::reduce_scatter, reduce_scatter_bytes(count, p.wire, S));
    if (R > 1)
      receive(plan.replicate, traffic, Collective::all_reduce, all_reduce_bytes(count, p.wire, R, replica));
  }
  return plan;
}

BytePlan plan_evaluation_bytes(const std::vector<UnitSpec>& units, const Mesh& mesh,
                               const EngineOptions& options) {
  BytePlan plan;
  for (const auto& unit : units)
    if (mesh.shard() > 1)
      receive(plan.shard, Traffic::evaluation, Collective::all_gather,
              all_gather_bytes(shard_elements(unit, mesh.shard()), options.precision.compute, mesh.shard()));
  return plan;
}

}  // namespace strata
