#include "checkpoint/restore.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "checkpoint/save.h"
#include "config/load.h"

namespace strata {
namespace {

// Keys that belong to a run's numbers: the state means something else with another value. A prefix ends in a
// dot.
constexpr std::array<const char*, 6> kFixed = {
    "model.", "precision", "optimizer.kind", "seed", "data.sequence_length", "data.groups"};
// Keys that decide what the outer state of a round in progress means.
constexpr std::array<const char*, 6> kFixedWithinRound = {
    "mesh.federate",    "federation.rule",  "federation.schedule",
    "federation.every", "federation.dtype", "federation.fragment_layers"};

bool names(const char* pattern, const std::string& key) {
  const std::string_view p = pattern;
  return p.ends_with('.') ? key.starts_with(p) : key == p;
}

// "/optimizer/lr" -> "optimizer.lr"
std::string dotted(std::string pointer) {
  std::replace(pointer.begin(), pointer.end(), '/', '.');
  return pointer.substr(1);
}

[[noreturn]] void refuse_within_round(const CheckpointManifest& c, const std::string& key,
                                      const std::string& then, const std::string& now) {
  throw UsageError(fmt::format(
      "{} was {} and is {}, but the checkpoint of step {} lies between two aggregations: its {} federation "
      "groups hold models of their own -> resume with {}={}, or from a checkpoint of a step that aggregated, "
      "or "
      "export the average (or one group) and start a new run from that",
      key, then, now, c.step, c.config.mesh.federate, key, then));
}

using Bytes = std::vector<std::byte>;

double number_at(const Bytes& bytes, DType dtype, std::size_t i) {
  if (dtype == DType::bf16) {
    bf16 x;
    std::memcpy(&x, bytes.data() + i * sizeof x, sizeof x);
    return to_float(x);
  }
  float x;
  std::memcpy(&x, bytes.data() + i * sizeof x, sizeof x);
  return x;
}

void set_number(Bytes& bytes, DType dtype, std::size_t i, double value) {
  if (dtype == DType::bf16) {
    const bf16 x = to_bf16(static_cast<float>(value));
    std::memcpy(bytes.data() + i * sizeof x, &x, sizeof x);
    return;
  }
  const auto x = static_cast<float>(value);
  std::memcpy(bytes.data() + i * sizeof x, &x, sizeof x);
}

class Restorer {
 public:
  Restorer(const Checkpoint& checkpoint, const MeshGroups& groups, Device& device, Stream& compute,
           ShardingEngine& engine)
      : checkpoint_(checkpoint), groups_(groups), device_(device), compute_(compute), engine_(engine) {}

  bool groups_changed() const { return checkpoint_.mesh().federate() != groups_.mesh.federate(); }

  void load(const CheckpointTensor& to) {
    const CheckpointKind* stored = checkpoint_.manifest().find_kind(to.kind);
    if (stored == nullptr)
      throw DataError(fmt::format("{}: holds no {} -> resume with the optimizer of the checkpoint",
                                  checkpoint_.folder().string(), to.kind));
    const CheckpointKind& kind = *stored;
    if (kind.dtype != to.data.dtype)
      throw DataError(
          fmt::format("{}: {} is {}, this run keeps {} -> resume with the precision of the checkpoint",
                      checkpoint_.folder().string(), to.kind, name_of(kind.dtype), name_of(to.data.dtype)));
    const ElementRange range =
        shard_range(engine_.shards()[static_cast<std::size_t>(to.unit)], groups_.at.shard);
    Bytes bytes(static_cast<std::size_t>(to.data.bytes()));  // padding: zero
    const Bytes values = kind.groups > 1 && groups_changed()
                             ? mean(kind, to.unit, range)
                             : read(to.kind, to.unit, groups_.at.federate, range);
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), values.size());
    if (to.host) {
      device_.synchronize();
      std::memcpy(to.data.data, bytes.data(), bytes.size());
      return;
    }
    device_.copy_to_device(compute_, to.data.data, bytes.data(), bytes.size());
    device_.synchronize(device_.record(compute_));
  }

 private:
  Bytes read(const std::string& kind, int unit, int group, const ElementRange& range) const {
    return checkpoint_.read(kind, unit, group, range.begin, range.count);
  }

  Bytes mean(const CheckpointKind& kind, int unit, const ElementRange& range) const {
    const auto n = static_cast<std::size_t>(range.count);
    std::vector<double> sum(n, 0.0);
    Bytes bytes;
    for (int g = 0; g < kind.groups; ++g) {
      bytes = read(kind.name, unit, g, range);
      for (std::size_t i = 0; i < n; ++i) sum[i] += number_at(bytes, kind.dtype, i);
    }
    for (std::size_t i = 0; i < n; ++i) set_number(bytes, kind.dtype, i, sum[i] / kind.groups);
    return bytes;
  }

  const Checkpoint& checkpoint_;
  const MeshGroups& groups_;
  Device& device_;
  Stream& compute_;
  ShardingEngine& engine_;
};

// The counts of a group's ranks are only ever added up: on another mesh its first rank takes the sum.
std::vector<std::int64_t> token_counts(const Checkpoint& checkpoint, const MeshGroups& groups) {
  const Mesh then = checkpoint.mesh(), now = groups.mesh;
  const auto& all = checkpoint.manifest().token_counts;
  if (then.federate() != now.federate() || all.empty()) return {};
  if (then.replicate() == now.replicate() && then.shard() == now.shard())
    return all.at(static_cast<std::size_t>(groups.position));
  std::vector<std::int64_t> sum(all.front().size(), 0);
  if (groups.at.replicate != 0 || groups.at.shard != 0) return sum;
  for (const int position : then.federation_group(then.position({groups.at.federate, 0, 0})))
    for (std::size_t p = 0; p < sum.size(); ++p) sum[p] += all.at(static_cast<std::size_t>(position)).at(p);
  return sum;
}

}  // namespace

std::vector<std::string> compatible_changes(const CheckpointManifest& checkpoint, const Config& now) {
  const auto a = nlohmann::json::parse(write_config(checkpoint.config)).flatten();
  const auto b = nlohmann::json::parse(write_config(now)).flatten();
  std::vector<std::string> changes, pointers;
  for (const auto& [pointer, value] : a.items()) pointers.push_back(pointer);
  for (const auto& [pointer, value] : b.items())
    if (!a.contains(pointer)) pointers.push_back(pointer);
  for (const std::string& pointer : pointers) {
    const std::string then = a.contains(pointer) ? a[pointer].dump() : "absent";
    const std::string here = b.contains(pointer) ? b[pointer].dump() : "absent";
    const std::string key = dotted(pointer);
    if (then == here || key == "model.preset") continue;
    for (const char* fixed : kFixed)
      if (names(fixed, key))
        throw UsageError(
            fmt::format("{} was {} when the checkpoint of step {} was written and is {} now; it cannot "
                        "change within a run -> "
                        "resume with the old value, or start a new run",
                        key, then, checkpoint.step, here));
    if (!checkpoint.aggregated)
      for (const char* fixed : kFixedWithinRound)
        if (key == fixed) refuse_within_round(checkpoint, key, then, here);
    changes.push_back(fmt::format("{}: {} -> {}", key, then, here));
  }
  return changes;
}

std::vector<std::string> restore(const Checkpoint& checkpoint, const MeshGroups& groups, Device& device,
                                 Stream& compute, ShardingEngine& engine, FederationScheduler& federation) {
  std::vector<std::string> notes;
  Restorer restorer(checkpoint, groups, device, compute, engine);
  const auto note = [&](std::string text) {
    if (std::find(notes.begin(), notes.end(), text) == notes.end()) notes.push_back(std::move(text));
  };
  if (restorer.groups_changed() && checkpoint.groups() > 1)
    throw DataError(fmt::format(
        "{}: holds {} models, the run has {} federation groups -> resume with mesh.federate={}",
        checkpoint.folder().string(), checkpoint.groups(), groups.mesh.federate(), checkpoint.groups()));

  device.synchronize();
  const std::vector<CheckpointTensor> inner = checkpoint_tensors(engine, federation);
  for (const CheckpointTensor& t : inner)
    if (t.kind == kind::parameter || t.kind == kind::m || t.kind == kind::v) restorer.load(t);
  engine.parameters_changed();

  federation.initialize();
  federation.resume(checkpoint.step(), [&](int unit) { return checkpoint.has(kind::delta, unit); });
  federation.set_host_state(token_counts(checkpoint, groups));
  device.synchronize();
  for (const CheckpointTensor& t : checkpoint_tensors(engine, federation)) {
    if (t.kind == kind::parameter || t.kind == kind::m || t.kind == kind::v) continue;
    if (!checkpoint.has(t.kind, t.unit)) {
      note(fmt::format("the checkpoint has no outer state '{}': it starts anew", t.kind));
    } else if (t.kind == kind::error && restorer.groups_changed()) {
      note("the error feedback of int8 aggregation is dropped");
    } else {
      restorer.load(t);
    }
  }
  const CheckpointKind* m = checkpoint.manifest().find_kind(kind::m);
  if (restorer.groups_changed() && m != nullptr)
    note(fmt::format("mesh.federate was {} and is {}: {}", checkpoint.mesh().federate(),
                     groups.mesh.federate(),
                     m->groups > 1 ? fmt::format("m and v are averaged over the {} groups", m->groups)
                                   : "every group takes the same m and v, those of the checkpoint"));
  engine.parameters_changed();
  return notes;
}

}  // namespace strata
