#include "sharding/weight_gatherer.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace strata {
namespace {

const char* name_of(WeightGatherer::Pass pass) {
  return pass == WeightGatherer::Pass::forward ? "forward" : "backward";
}

}  // namespace

WeightGatherer::WeightGatherer(EngineParts parts)
    : parts_(parts),
      stream_(parts_.device.create_stream("gather", Device::StreamKind::transfer)),
      slot_of_(parts_.units.size(), nullptr),
      kept_(parts_.units.size(), false) {
  const auto& b = parts_.buffers;
  const auto allocate = [&](std::int64_t elements, bool edge) {
    const auto bytes = static_cast<std::size_t>(elements) * size_of(parts_.options.precision.compute);
    if (bytes > 0) ring_.add(parts_.device.allocate(bytes, Purpose::weights), edge);
  };
  for (int i = 0; i < b.weight_slots; ++i) allocate(b.weight_slot_elements, false);
  allocate(b.edge_weight_slot_elements, true);
}

void WeightGatherer::begin_pass(Kind kind, std::int64_t step) {
  const Event now = parts_.device.record(parts_.compute);
  for (Slot& slot : ring_.slots())
    if (slot.unit >= 0) ring_.give_back(slot, now);
  std::fill(slot_of_.begin(), slot_of_.end(), nullptr);
  std::fill(kept_.begin(), kept_.end(), false);
  kind_ = kind;
  step_ = step;
  plan_visits();
  position_ = -1;
  next_ = 0;
  gather_up_to(parts_.options.prefetch - 1);
}

// Head and root stay gathered from forward into backward; the embedding's backward reads no weights.
void WeightGatherer::plan_visits() {
  visits_.clear();
  const int n = static_cast<int>(parts_.units.size());
  for (int u = 0; u < n; ++u) visits_.push_back({u, Pass::forward});
  if (kind_ == Kind::evaluation || !parts_.options.reshard_after_forward) return;
  for (int u = n - 1; u >= 0; --u)
    if (!parts_.edge(u)) visits_.push_back({u, Pass::backward});
}

bool WeightGatherer::keeps(int unit, Pass pass) const {
  switch (parts_.unit(unit).kind) {
    case UnitKind::root:
      return true;
    case UnitKind::head:
      return kind_ == Kind::training && pass == Pass::forward;
    case UnitKind::decoder:
      return kind_ == Kind::training && pass == Pass::forward && !parts_.options.reshard_after_forward;
    case UnitKind::embedding:
      return false;
  }
  return false;
}

void WeightGatherer::refuse_order(int unit, Pass pass) const {
  const std::size_t next = static_cast<std::size_t>(position_ + 1);
  const std::string expected =
      next < visits_.size()
          ? fmt::format("{} in {}", parts_.unit(visits_[next].unit).name, name_of(visits_[next].pass))
          : "nothing more in this pass";
  throw InternalError(
      fmt::format("the weights of {} were asked for in {}, expected was {} -> ask for units in order "
                  "in forward and in reverse order in backward",
                  parts_.unit(unit).name, name_of(pass), expected));
}

Flat WeightGatherer::acquire(int unit, Pass pass) {
  const auto u = static_cast<std::size_t>(unit);
  if (!kept_[u]) {
    const auto next = static_cast<std::size_t>(position_ + 1);
    if (next >= visits_.size() || visits_[next].unit != unit || visits_[next].pass != pass)
      refuse_order(unit, pass);
    gather_up_to(position_ + 1);
    if (next_ <= position_ + 1)
      throw InternalError(
          fmt::format("no slot is free for the weights of {}: every slot is leased -> release the "
                      "lease of a unit before asking for the next",
                      parts_.unit(unit).name));
    ++position_;
  }
  // Before the wait: on a CPU the wait holds the host up, and the next gathers should be under way meanwhile.
  gather_up_to(position_ + parts_.options.prefetch);

  const UnitShard& shard = parts_.shard(unit);
  if (parts_.shard_count() == 1) {
    parts_.device.wait(parts_.compute, shard.ready);
    return shard.gathered().slice(0, parts_.unit(unit).elements);
  }
  const Slot& slot = *slot_of_[u];
  parts_.device.wait(parts_.compute, slot.filled);
  return {slot.memory.data(), parts_.options.precision.compute, parts_.unit(unit).elements};
}

void WeightGatherer::release(int unit, Pass pass) {
  const auto u = static_cast<std::size_t>(unit);
  kept_[u] = keeps(unit, pass);
  if (kept_[u]) return;
  if (slot_of_[u] != nullptr) ring_.give_back(*slot_of_[u], parts_.device.record(parts_.compute));
  slot_of_[u] = nullptr;
  gather_up_to(position_ + parts_.options.prefetch);
}

void WeightGatherer::gather_up_to(std::ptrdiff_t last) {
  last = std::min(last, static_cast<std::ptrdiff_t>(visits_.size()) - 1);
  for (; next_ <= last; ++next_) {
    const int unit = visits_[static_cast<std::size_t>(next_)].unit;
    Slot* slot = nullptr;
    if (parts_.shard_count() > 1) {
      // A unit that is still in use, or a ring that is full: a later release tries again.
      if (slot_of_[static_cast<std::size_t>(unit)] != nullptr) return;
      slot = ring_.take(unit, parts_.edge(unit));
      if (slot == nullptr) return;
    }
    if (before_gather) before_gather(unit);
    if (slot != nullptr) gather(*slot, unit);
  }
}

void WeightGatherer::gather(Slot& slot, int unit) {
  const UnitShard& shard = parts_.shard(unit);
  parts_.device.wait(stream_, shard.ready);
  parts_.device.wait(stream_, slot.released);
  const Traffic traffic = kind_ == Kind::evaluation ? Traffic::evaluation : parts_.traffic(unit);
  const ConstFlat source = shard.gathered();
  parts_.groups.shard->all_gather(stream_, {traffic, parts_.unit(unit).name, step_},
                                  {slot.memory.data(), source.dtype, parts_.padded(unit)}, source);
  slot.filled = parts_.device.record(stream_);
  slot_of_[static_cast<std::size_t>(unit)] = &slot;
}

}  // namespace strata
