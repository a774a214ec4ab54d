#pragma once
// Saving: every rank writes its share of the training state, and the checkpoint counts only once all of it is
// on the disk.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "backend/device.h"
#include "checkpoint/manifest.h"
#include "federation/scheduler.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"

namespace strata {

// One kind of state of one unit, as this rank holds it: shard-sized, padding included.
struct CheckpointTensor {
  std::string kind;
  int unit = 0;
  Flat data;
  bool host = false;  // lies in host memory
};

// Everything a checkpoint holds of engine and federation, in an order that is the same on all ranks.
std::vector<CheckpointTensor> checkpoint_tensors(ShardingEngine& engine,
                                                 const FederationScheduler& federation);

// Elements of the unit that a rank's shard holds: its range of the flat buffer, without padding.
struct ElementRange {
  std::int64_t begin = 0, count = 0;
};
ElementRange shard_range(const UnitShard& shard, int place);

class CheckpointSaver {
 public:
  // folder: <run>/checkpoints. keep: how many checkpoints stay.
  CheckpointSaver(World& world, const MeshGroups& groups, Device& device, Stream& compute,
                  ShardingEngine& engine, FederationScheduler& federation, std::filesystem::path folder,
                  std::int64_t keep);

  // Collective over the world; the host waits. Fills kinds, parts and token counts of `state`, writes into
  // step_N.partial and renames at the end, then deletes the oldest checkpoints beyond `keep`. Returns the
  // checkpoint's folder. Throws DataError on every rank when any of them fails (disk full, folder not
  // writable), leaving what was there before; InternalError when replicas do not hold equal values.
  std::filesystem::path save(CheckpointManifest state);

 private:
  std::string digests(const std::vector<CheckpointTensor>& tensors);
  std::vector<CheckpointKind> compare(const std::vector<CheckpointTensor>& tensors,
                                      const std::vector<std::string>& digests) const;
  bool writes(std::size_t item, const CheckpointKind& kind) const;
  CheckpointPart write_part(const std::filesystem::path& folder, const std::vector<CheckpointTensor>& tensors,
                            const std::vector<CheckpointKind>& kinds);
  // Calls `take` with the tensor's elements without padding, in pieces that lie in host memory.
  void fetch(const CheckpointTensor& tensor, const std::function<void(std::span<const std::byte>)>& take);
  ElementRange range_of(const CheckpointTensor& tensor) const;
  void publish(const std::filesystem::path& partial, const std::filesystem::path& path,
               const CheckpointManifest& manifest) const;
  void retain(std::int64_t step) const;

  World& world_;
  const MeshGroups& groups_;
  Device& device_;
  Stream& compute_;
  ShardingEngine& engine_;
  FederationScheduler& federation_;
  std::filesystem::path folder_;
  std::int64_t keep_;
  std::vector<std::byte> host_;
};

// Bytes of state in a checkpoint, headers and manifest aside: after an aggregation, and between two of them,
// when every federation group has a model of its own.
struct CheckpointBytes {
  std::int64_t aggregated = 0, between = 0;
};
CheckpointBytes plan_checkpoint_bytes(const Config& config);

}  // namespace strata
