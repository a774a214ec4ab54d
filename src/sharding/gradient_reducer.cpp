#include "sharding/gradient_reducer.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace strata {

GradientReducer::GradientReducer(EngineParts parts)
    : parts_(parts),
      reduce_(parts_.device.create_stream("reduce", Device::StreamKind::transfer)),
      replicate_(parts_.device.create_stream("replicate", Device::StreamKind::transfer)),
      slot_of_(parts_.units.size(), nullptr),
      state_(parts_.units.size(), State::untouched),
      done_(parts_.units.size()) {
  const BufferPlan& b = parts_.buffers;
  const auto allocate = [&](std::int64_t elements, DType dtype, Purpose purpose) {
    return parts_.device.allocate(static_cast<std::size_t>(elements) * size_of(dtype), purpose);
  };
  const auto add_slot = [&](std::int64_t elements, bool edge) {
    if (elements > 0) ring_.add(allocate(elements, b.gradient_slot_dtype, Purpose::gradients), edge);
  };
  if (parts_.shard_count() > 1) {
    const int n = static_cast<int>(parts_.units.size());
    if (parts_.options.accumulate_full) {
      for (int u = 0; u < n; ++u) add_slot(parts_.padded(u), parts_.edge(u));
      for (int u = 0; u < n; ++u)
        slot_of_[static_cast<std::size_t>(u)] = &ring_.slots()[static_cast<std::size_t>(u)];
    } else {
      for (int i = 0; i < b.gradient_slots; ++i) add_slot(b.gradient_slot_elements, false);
      add_slot(b.edge_gradient_slot_elements, true);
    }
  }
  const DType wire = parts_.options.precision.wire;
  if (b.reduced_elements > 0) reduced_ = allocate(b.reduced_elements, b.reduced_dtype, Purpose::workspace);
  if (b.wire_elements > 0) wire_ = allocate(b.wire_elements, wire, Purpose::workspace);
  if (b.replica_wire_elements > 0)
    replica_wire_ = allocate(b.replica_wire_elements, wire, Purpose::workspace);
}

void GradientReducer::begin_step(std::int64_t step) {
  step_ = step;
}

void GradientReducer::begin_micro_step(int k) {
  if (k > 0) require_whole();
  micro_step_ = k;
  std::fill(state_.begin(), state_.end(), State::untouched);
}

Slot& GradientReducer::slot(int unit) {
  Slot*& slot = slot_of_[static_cast<std::size_t>(unit)];
  if (slot == nullptr) {
    slot = ring_.take(unit, parts_.edge(unit));
    if (slot == nullptr)
      throw InternalError(
          fmt::format("no slot is free for the gradient of {}: every slot is leased -> release the "
                      "gradient of a unit before asking for the next",
                      parts_.unit(unit).name));
  }
  return *slot;
}

GradientReducer::Target GradientReducer::acquire(int unit) {
  State& state = state_[static_cast<std::size_t>(unit)];
  if (state == State::whole)
    throw InternalError(
        fmt::format("the gradient of {} was asked for a second time in micro-step {} -> lease it once "
                    "and keep the lease until it is complete",
                    parts_.unit(unit).name, micro_step_));
  const bool started = state == State::partial;
  state = State::leased;
  const std::int64_t elements = parts_.unit(unit).elements;

  if (parts_.shard_count() == 1)
    return {parts_.shard(unit).gradient.slice(0, elements), started || micro_step_ > 0};

  Slot& s = slot(unit);
  const bool accumulate = started || (parts_.options.accumulate_full && micro_step_ > 0);
  const Flat full{s.memory.data(), parts_.buffers.gradient_slot_dtype, parts_.padded(unit)};
  if (!accumulate) {
    parts_.device.wait(parts_.compute, s.released);
    // Another unit may have left its values where this one has padding.
    const Flat tail = full.slice(elements, full.count - elements);
    if (tail.count > 0)
      parts_.device.fill_zero(parts_.compute, tail.data, static_cast<std::size_t>(tail.bytes()));
  }
  return {full.slice(0, elements), accumulate};
}

// The root's gradient has two parts: the output matrix and the norm at the start of backward, the embedding
// at its end.
bool GradientReducer::whole_after_release(int unit) const {
  if (parts_.unit(unit).kind != UnitKind::root) return true;
  for (std::size_t u = 0; u < parts_.units.size(); ++u)
    if (parts_.units[u].kind == UnitKind::decoder && state_[u] != State::whole) return false;
  return true;
}

void GradientReducer::release(int unit) {
  State& state = state_[static_cast<std::size_t>(unit)];
  state = State::partial;
  if (!whole_after_release(unit)) return;
  state = State::whole;
  reduce(unit);
}

void GradientReducer::reduce(int unit) {
  // One unit late, because collectives start in the order of their enqueuing: an all-reduce that still waits
  // for its reduce-scatter would hold back the next gather.
  reduce_over_replicas();
  if (parts_.options.accumulate_full && !last_micro_step()) return;
  Event done = parts_.device.record(parts_.compute);
  if (parts_.shard_count() > 1) done = reduce_scatter(unit, done);
  done_[static_cast<std::size_t>(unit)] = done;
  if (last_micro_step() && parts_.replicas() > 1) replica_due_ = unit;
}

Event GradientReducer::reduce_scatter(int unit, const Event& written) {
  const EngineOptions& options = parts_.options;
  const Precision& p = options.precision;
  const bool first = options.accumulate_full || micro_step_ == 0;
  Slot& s = slot(unit);
  ConstFlat full{s.memory.data(), parts_.buffers.gradient_slot_dtype, parts_.padded(unit)};
  const Flat gradient = parts_.shard(unit).gradient;

  parts_.device.wait(reduce_, written);
  if (full.dtype != p.wire) {
    const Flat wire{wire_.data(), p.wire, full.count};
    parts_.ops.cast(reduce_, wire, full);
    full = wire;
  }
  const bool direct = first && (p.gradient == DType::f32 || p.wire == DType::bf16);
  const Flat reduced =
      direct ? gradient : Flat{reduced_.data(), parts_.buffers.reduced_dtype, gradient.count};
  parts_.groups.shard->reduce_scatter(reduce_, {parts_.traffic(unit), parts_.unit(unit).name, step_}, reduced,
                                      full, options.reduce);
  if (options.accumulate_full) {
    s.released = parts_.device.record(reduce_);
  } else {
    ring_.give_back(s, parts_.device.record(reduce_));
    slot_of_[static_cast<std::size_t>(unit)] = nullptr;
  }
  if (!direct) {
    if (first) {
      parts_.ops.cast(reduce_, gradient, reduced);
    } else {
      parts_.ops.axpby(reduce_, gradient, 1, reduced, 1);
    }
  }
  return parts_.device.record(reduce_);
}

void GradientReducer::reduce_over_replicas() {
  if (replica_due_ < 0) return;
  const int unit = replica_due_;
  replica_due_ = -1;
  Event& done = done_[static_cast<std::size_t>(unit)];
  const Flat gradient = parts_.shard(unit).gradient;
  const CollectiveLabel label{parts_.traffic(unit), parts_.unit(unit).name, step_};
  const DType wire_dtype = parts_.options.precision.wire;

  parts_.device.wait(replicate_, done);
  if (gradient.dtype == wire_dtype) {
    parts_.groups.replicate->all_reduce_sum(replicate_, label, gradient, parts_.options.reduce);
  } else {
    const Flat wire{replica_wire_.data(), wire_dtype, gradient.count};
    parts_.ops.cast(replicate_, wire, gradient);
    parts_.groups.replicate->all_reduce_sum(replicate_, label, wire, parts_.options.reduce);
    parts_.ops.cast(replicate_, gradient, wire);
  }
  done = parts_.device.record(replicate_);
}

void GradientReducer::require_whole() const {
  for (std::size_t u = 0; u < parts_.units.size(); ++u)
    if (state_[u] != State::whole)
      throw InternalError(
          fmt::format("step {}: the gradient of {} {} -> every unit's gradient must be leased and "
                      "released in each micro-step",
                      step_, parts_.units[u].name,
                      state_[u] == State::untouched ? "was never written" : "is still leased"));
}

void GradientReducer::finish() {
  require_whole();
  if (!last_micro_step())
    throw InternalError(fmt::format("step {} was finished after {} of {} micro-steps -> run all of them",
                                    step_, micro_step_ + 1, parts_.options.micro_steps));
  reduce_over_replicas();
  for (const Event& done : done_) parts_.device.wait(parts_.compute, done);
}

}  // namespace strata
