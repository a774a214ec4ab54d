#include "checkpoint/save.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/log.h"
#include "checkpoint/agree.h"
#include "checkpoint/checksum.h"
#include "checkpoint/folder.h"
#include "checkpoint/safetensors.h"
#include "federation/aggregator.h"
#include "model/parameter_table.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::size_t kPieceBytes = std::size_t{4} << 20;  // on the way from device to file

constexpr const char* kPartial = ".partial";    // being written
constexpr const char* kDeleting = ".deleting";  // being deleted

const CheckpointKind& find(const std::vector<CheckpointKind>& kinds, const std::string& name) {
  return *std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.name == name; });
}

// What an interrupted save or deletion left behind.
void clean(const fs::path& folder) {
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string extension = entry.path().extension().string();
    if (entry.is_directory() && (extension == kPartial || extension == kDeleting))
      stale.push_back(entry.path());
  }
  for (const fs::path& path : stale) fs::remove_all(path);
}

json to_json(const CheckpointPart& part) {
  json pieces = json::array();
  for (const auto& p : part.pieces) pieces.push_back({p.kind, p.unit, p.group, p.begin, p.count, p.checksum});
  return {{"file", part.file}, {"bytes", part.bytes}, {"pieces", std::move(pieces)}};
}

CheckpointPart part_from(const std::string& text) {
  const json j = json::parse(text);
  CheckpointPart part{j.at("file"), j.at("bytes"), {}};
  for (const json& p : j.at("pieces")) part.pieces.push_back({p[0], p[1], p[2], p[3], p[4], p[5]});
  return part;
}

}  // namespace

std::vector<CheckpointTensor> checkpoint_tensors(ShardingEngine& engine,
                                                 const FederationScheduler& federation) {
  std::vector<CheckpointTensor> tensors;
  const auto add = [&](const char* kind, Flat UnitShard::*member) {
    for (std::size_t u = 0; u < engine.shards().size(); ++u) {
      const Flat& data = engine.shards()[u].*member;
      if (data) tensors.push_back({kind, static_cast<int>(u), data});
    }
  };
  add(kind::parameter, &UnitShard::parameter);
  add(kind::m, &UnitShard::m);
  add(kind::v, &UnitShard::v);
  // "outer.decoder.3.theta_old": the kind is the last word.
  for (const NamedState& s : federation.state())
    tensors.push_back({s.name.substr(s.name.rfind('.') + 1), s.unit, s.data, s.host});
  return tensors;
}

ElementRange shard_range(const UnitShard& shard, int place) {
  const std::int64_t begin = std::min(shard.count * place, shard.spec->elements);
  return {begin, std::min(shard.count, shard.spec->elements - begin)};
}

CheckpointSaver::CheckpointSaver(World& world, const MeshGroups& groups, Device& device, Stream& compute,
                                 ShardingEngine& engine, FederationScheduler& federation, fs::path folder,
                                 std::int64_t keep)
    : world_(world),
      groups_(groups),
      device_(device),
      compute_(compute),
      engine_(engine),
      federation_(federation),
      folder_(std::move(folder)),
      keep_(keep) {}

fs::path CheckpointSaver::save(CheckpointManifest state) {
  fs::path path = folder_ / checkpoint_name(state.step);
  const fs::path partial = path.string() + kPartial;
  const bool first = world_.rank() == 0;
  federation_.finish();
  for (const UnitShard& shard : engine_.shards()) device_.wait(compute_, shard.ready);
  const std::vector<CheckpointTensor> tensors = checkpoint_tensors(engine_, federation_);

  // A failure, like the last rank's last byte, is known to all before anyone goes on.
  try {
    const auto all_digests = agree(world_, "checkpoint", state.step, [&] {
      if (first) {
        fs::create_directories(folder_);
        clean(folder_);
        fs::create_directory(partial);
      }
      return digests(tensors);
    });
    state.kinds = compare(tensors, all_digests);
    const auto parts = agree(world_, "checkpoint", state.step, [&] {
      await_visible(partial);
      const CheckpointPart part = write_part(partial, tensors, state.kinds);
      return json{{"part", to_json(part).dump()},
                  {"position", groups_.position},
                  {"token_counts", federation_.host_state()}}
          .dump();
    });
    state.token_counts.resize(parts.size());
    state.parts.resize(parts.size());
    for (const std::string& text : parts) {
      const json j = json::parse(text);
      const std::size_t position = j.at("position");
      state.token_counts[position] = j.at("token_counts").get<std::vector<std::int64_t>>();
      state.parts[position] = part_from(j.at("part"));
    }
    std::erase_if(state.parts, [](const CheckpointPart& p) { return p.pieces.empty(); });
    agree(world_, "checkpoint", state.step, [&] {
      if (first) publish(partial, path, state);
      return std::string();
    });
  } catch (...) {
    std::error_code ignored;
    if (first) fs::remove_all(partial, ignored);
    throw;
  }
  agree(world_, "checkpoint", state.step, [&] {
    if (first) retain(state.step);
    return std::string();
  });
  host_ = {};
  return path;
}

ElementRange CheckpointSaver::range_of(const CheckpointTensor& tensor) const {
  return shard_range(engine_.shards()[static_cast<std::size_t>(tensor.unit)], groups_.at.shard);
}

void CheckpointSaver::fetch(const CheckpointTensor& tensor,
                            const std::function<void(std::span<const std::byte>)>& take) {
  const std::size_t bytes = static_cast<std::size_t>(range_of(tensor).count) * size_of(tensor.data.dtype);
  const auto* data = static_cast<const std::byte*>(tensor.data.data);
  if (tensor.host) {
    device_.synchronize(device_.record(compute_));
    return take({data, bytes});
  }
  host_.resize(kPieceBytes);
  for (std::size_t done = 0; done < bytes; done += kPieceBytes) {
    const std::size_t n = std::min(kPieceBytes, bytes - done);
    device_.copy_to_host(compute_, host_.data(), data + done, n);
    device_.synchronize(device_.record(compute_));
    take({host_.data(), n});
  }
}

// {"parameter": checksum over all units, ...}; nothing when there is nobody to compare with.
std::string CheckpointSaver::digests(const std::vector<CheckpointTensor>& tensors) {
  json out = json::object();
  if (groups_.mesh.federate() * groups_.mesh.replicate() == 1) return out.dump();
  std::map<std::string, Checksum> sums;
  for (const CheckpointTensor& t : tensors) fetch(t, [&](auto bytes) { sums[t.kind].add(bytes); });
  for (const auto& [kind, sum] : sums) out[kind] = sum.text();
  return out.dump();
}

std::vector<CheckpointKind> CheckpointSaver::compare(const std::vector<CheckpointTensor>& tensors,
                                                     const std::vector<std::string>& digests) const {
  std::vector<CheckpointKind> kinds;
  for (const CheckpointTensor& t : tensors)
    if (kinds.empty() || std::none_of(kinds.begin(), kinds.end(), [&](auto& k) { return k.name == t.kind; }))
      kinds.push_back({t.kind, t.data.dtype, 1});
  const Mesh& mesh = groups_.mesh;
  if (mesh.federate() * mesh.replicate() == 1) return kinds;

  std::vector<json> by_position(digests.size());
  for (std::size_t p = 0; p < digests.size(); ++p)
    by_position[p] = json::parse(digests[static_cast<std::size_t>(groups_.world->world_ranks()[p])]);
  const auto digest = [&](int f, int r, int s, const std::string& kind) {
    return by_position[static_cast<std::size_t>(mesh.position({f, r, s}))].value(kind, "");
  };
  for (CheckpointKind& kind : kinds) {
    for (int position = 0; position < mesh.size(); ++position) {
      const MeshCoordinates at = mesh.coordinates(position);
      const std::string mine = digest(at.federate, at.replicate, at.shard, kind.name);
      if (mine != digest(at.federate, 0, at.shard, kind.name))
        throw InternalError(fmt::format(
            "checkpoint: {} differs between the replicas at mesh positions {} and {} -> resume from the last "
            "checkpoint; look for faulty memory or a collective that is not deterministic",
            kind.name, mesh.position({at.federate, 0, at.shard}), position));
      if (mine != digest(0, 0, at.shard, kind.name)) kind.groups = mesh.federate();
    }
  }
  return kinds;
}

// Ranks that hold the same values take turns.
bool CheckpointSaver::writes(std::size_t item, const CheckpointKind& kind) const {
  const auto replicas = static_cast<std::size_t>(groups_.mesh.replicate());
  const auto r = static_cast<std::size_t>(groups_.at.replicate);
  if (kind.groups > 1) return item % replicas == r;
  const auto copies = static_cast<std::size_t>(groups_.mesh.federate()) * replicas;
  return item % copies == static_cast<std::size_t>(groups_.at.federate) * replicas + r;
}

CheckpointPart CheckpointSaver::write_part(const fs::path& folder,
                                           const std::vector<CheckpointTensor>& tensors,
                                           const std::vector<CheckpointKind>& kinds) {
  std::vector<const CheckpointTensor*> mine;
  std::vector<SafetensorsSpec> specs;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const CheckpointTensor& t = tensors[i];
    if (range_of(t).count == 0 || !writes(i, find(kinds, t.kind))) continue;
    mine.push_back(&t);
    specs.push_back({piece_name(t.kind, engine_.units()[static_cast<std::size_t>(t.unit)].name),
                     t.data.dtype,
                     {range_of(t).count}});
  }
  CheckpointPart part{fmt::format("part_{:05}.safetensors", groups_.position), 0, {}};
  if (mine.empty()) return part;
  SafetensorsWriter writer(folder / part.file, specs);
  for (const CheckpointTensor* t : mine) {
    Checksum sum;
    fetch(*t, [&](auto bytes) {
      sum.add(bytes);
      writer.append(bytes);
    });
    const ElementRange range = range_of(*t);
    const int group = find(kinds, t->kind).groups > 1 ? groups_.at.federate : 0;
    part.pieces.push_back({t->kind, t->unit, group, range.begin, range.count, sum.text()});
  }
  writer.finish();
  sync_folder(folder);
  part.bytes = fs::file_size(folder / part.file);
  return part;
}

void CheckpointSaver::publish(const fs::path& partial, const fs::path& path,
                              const CheckpointManifest& manifest) const {
  write_durably(partial / kManifestFile, write_manifest(manifest));
  sync_folder(partial);
  if (fs::exists(path))
    log_warning("{} was there already: it is now called {}", path.string(),
                set_aside(path, "superseded").filename().string());
  fs::rename(partial, path);
  sync_folder(folder_);
}

void CheckpointSaver::retain(std::int64_t step) const {
  std::vector<CheckpointFolder> all = list_checkpoints(folder_);
  std::erase_if(all, [step](const CheckpointFolder& c) { return c.step > step; });
  // The new one counts even where the file system does not show it yet.
  const bool shown = !all.empty() && all.back().step == step;
  const auto others = static_cast<std::int64_t>(all.size()) - (shown ? 1 : 0);
  for (std::int64_t i = 0; i < others - (keep_ - 1); ++i) {
    const fs::path doomed = all[static_cast<std::size_t>(i)].path.string() + kDeleting;
    fs::rename(all[static_cast<std::size_t>(i)].path, doomed);
    fs::remove_all(doomed);
  }
}

CheckpointBytes plan_checkpoint_bytes(const Config& config) {
  const Mesh mesh(config.mesh);
  const Precision precision = Precision::from(config.precision, config.reduce_dtype);
  const FederationOptions options = effective_options(FederationOptions::from(config), mesh);
  const AggregationKind kind = aggregation_kind(mesh, precision, options);
  const std::int64_t elements = parameter_count(llama_units(config.model));
  const auto master = static_cast<std::int64_t>(size_of(precision.master));
  const std::int64_t moments = config.optimizer.kind == "adamw" ? 2 * master : 0;
  std::int64_t once = 0, each_group = moments;
  if (!kind.identity && !kind.parameters) {
    once += 4 + (options.rule != OuterRule::fedavg ? 4 : 0);
    each_group += options.wire == DType::i8 ? 4 : 0;
  }
  const std::int64_t F = mesh.federate();
  return {elements * (once + master + F * each_group), elements * (once + F * (master + each_group))};
}

}  // namespace strata
