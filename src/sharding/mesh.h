#pragma once
// Mesh: the F x R x S arrangement of ranks and the groups that follow from it. Pure arithmetic; MeshGroups
// adds the communicators of one rank.
#include <memory>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "config/config.h"

namespace strata {

struct MeshCoordinates {
  int federate = 0, replicate = 0, shard = 0;
};

// Positions in the mesh are numbered row-major: (f R + r) S + s.
class Mesh {
 public:
  // Throws UsageError when a size is not positive or the product does not fit an int.
  Mesh(int federate, int replicate, int shard);
  explicit Mesh(const MeshConfig& config) : Mesh(config.federate, config.replicate, config.shard) {}

  int federate() const { return federate_; }
  int replicate() const { return replicate_; }
  int shard() const { return shard_; }
  int size() const { return federate_ * replicate_ * shard_; }
  // "FL+HSDP (federate 2 x replicate 2 x shard 4)"
  std::string describe() const;

  MeshCoordinates coordinates(int position) const;
  int position(MeshCoordinates at) const {
    return (at.federate * replicate_ + at.replicate) * shard_ + at.shard;
  }

  // The groups that `position` belongs to, members in group order.
  std::vector<int> shard_group(int position) const;       // same f, r
  std::vector<int> replica_group(int position) const;     // same f, s
  std::vector<int> federation_peers(int position) const;  // same r, s
  std::vector<int> federation_group(int position) const;  // same f

  // With `replicas: one`, the replica that aggregates shard s for its federation group. Senders are spread
  // over the replicas, so that no node carries a whole group's traffic.
  int sender_replica(int shard) const { return shard % replicate_; }
  // World positions of a federation group's senders, by shard.
  std::vector<int> senders(int federation_group) const;

  // Throws UsageError showing the arithmetic unless the mesh fills the world exactly.
  void require_world(int world_size) const;

 private:
  int federate_, replicate_, shard_;
};

// One rank's place in the mesh and its communicators.
struct MeshGroups {
  Mesh mesh;
  int position = 0;
  MeshCoordinates at;
  std::unique_ptr<Communicator> shard, replicate, federate, group, world;
};

// Collective over the world. `placement[position]` is the world rank that takes a position; empty: the
// identity. Throws UsageError when the mesh does not fill the world or the placement is no permutation of its
// ranks, and InternalError when a communicator comes out with another size than the mesh asked for.
MeshGroups make_groups(World& world, const Mesh& mesh, const std::vector<int>& placement = {});

}  // namespace strata
