#include "sharding/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace strata {
namespace {

const char* strategy_name(const Mesh& mesh) {
  const bool f = mesh.federate() > 1, r = mesh.replicate() > 1, s = mesh.shard() > 1;
  if (f) return s ? (r ? "FL+HSDP" : "FL+FSDP") : (r ? "FL+DDP" : "FL");
  return s ? (r ? "HSDP" : "FSDP") : (r ? "DDP" : "one process");
}

std::unique_ptr<Communicator> make_group(World& world, const char* name, const std::vector<int>& positions,
                                         const std::vector<int>& placement) {
  std::vector<int> ranks;
  for (const int p : positions) ranks.push_back(placement[static_cast<std::size_t>(p)]);
  auto group = world.group(name, ranks);
  if (group->size() != static_cast<int>(ranks.size()))
    throw InternalError(
        fmt::format("the {} group of ranks {} came out with {} members instead of {} -> report this", name,
                    fmt::join(ranks, ","), group->size(), ranks.size()));
  return group;
}

}  // namespace

Mesh::Mesh(int federate, int replicate, int shard)
    : federate_(federate), replicate_(replicate), shard_(shard) {
  for (const auto& [key, size] :
       {std::pair{"federate", federate}, std::pair{"replicate", replicate}, std::pair{"shard", shard}})
    if (size < 1)
      throw UsageError(
          fmt::format("mesh.{} is {}, allowed are sizes from 1 -> give each size of the mesh or leave "
                      "it out for 1",
                      key, size));
  const std::int64_t two = static_cast<std::int64_t>(federate) * replicate;
  if (two > std::numeric_limits<int>::max() || two * shard > std::numeric_limits<int>::max())
    throw UsageError(
        fmt::format("the mesh {} x {} x {} has more ranks than can be counted -> use smaller sizes", federate,
                    replicate, shard));
}

std::string Mesh::describe() const {
  return fmt::format("{} (federate {} x replicate {} x shard {})", strategy_name(*this), federate_,
                     replicate_, shard_);
}

MeshCoordinates Mesh::coordinates(int position) const {
  if (position < 0 || position >= size())
    throw InternalError(
        fmt::format("position {} lies outside a mesh of {} ranks -> report this", position, size()));
  return {position / (replicate_ * shard_), position / shard_ % replicate_, position % shard_};
}

std::vector<int> Mesh::shard_group(int p) const {
  const auto at = coordinates(p);
  std::vector<int> ranks;
  for (int s = 0; s < shard_; ++s) ranks.push_back(position({at.federate, at.replicate, s}));
  return ranks;
}

std::vector<int> Mesh::replica_group(int p) const {
  const auto at = coordinates(p);
  std::vector<int> ranks;
  for (int r = 0; r < replicate_; ++r) ranks.push_back(position({at.federate, r, at.shard}));
  return ranks;
}

std::vector<int> Mesh::federation_peers(int p) const {
  const auto at = coordinates(p);
  std::vector<int> ranks;
  for (int f = 0; f < federate_; ++f) ranks.push_back(position({f, at.replicate, at.shard}));
  return ranks;
}

std::vector<int> Mesh::federation_group(int p) const {
  std::vector<int> ranks(static_cast<std::size_t>(replicate_) * shard_);
  std::iota(ranks.begin(), ranks.end(), position({coordinates(p).federate, 0, 0}));
  return ranks;
}

std::vector<int> Mesh::senders(int federation_group) const {
  std::vector<int> ranks;
  for (int s = 0; s < shard_; ++s) ranks.push_back(position({federation_group, sender_replica(s), s}));
  return ranks;
}

void Mesh::require_world(int world_size) const {
  if (size() == world_size) return;
  throw UsageError(fmt::format(
      "the mesh needs federate {} x replicate {} x shard {} = {} ranks, but {} {} started -> start {} "
      "ranks (mpiexec -n {}), or choose sizes whose product is {}",
      federate_, replicate_, shard_, size(), world_size, world_size == 1 ? "was" : "were", size(), size(),
      world_size));
}

MeshGroups make_groups(World& world, const Mesh& mesh, const std::vector<int>& placement) {
  mesh.require_world(world.size());
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto& placed = placement.empty() ? ranks : placement;
  if (!std::is_permutation(ranks.begin(), ranks.end(), placed.begin(), placed.end()))
    throw UsageError(
        fmt::format("the placement [{}] is no permutation of the {} ranks -> list every rank once, by "
                    "position in the mesh",
                    fmt::join(placed, ","), world.size()));

  const int position =
      static_cast<int>(std::find(placed.begin(), placed.end(), world.rank()) - placed.begin());
  MeshGroups groups{mesh, position, mesh.coordinates(position), nullptr, nullptr, nullptr, nullptr, nullptr};
  groups.shard = make_group(world, "shard", mesh.shard_group(position), placed);
  groups.replicate = make_group(world, "replicate", mesh.replica_group(position), placed);
  groups.federate = make_group(world, "federate", mesh.federation_peers(position), placed);
  groups.group = make_group(world, "group", mesh.federation_group(position), placed);
  groups.world = make_group(world, "world", ranks, placed);
  return groups;
}

}  // namespace strata
