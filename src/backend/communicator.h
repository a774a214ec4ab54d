#pragma once
// Communicator: the collectives of one group of ranks, enqueued on a stream like any other work.
//
// Counts are in elements. Reductions do not depend on the transport's algorithm: contributions are added in
// rank order (fp32 in fp64, bf16 in fp32) and rounded once to the output's dtype; so n identical copies
// average to themselves exactly. (Over NCCL the identities hold to 1e-6 only.) Every rank of the group must
// enqueue the same collectives in the same order; on one process all collectives of all groups start in the
// order in which they were enqueued. A group of one moves no bytes: it copies, casts or does nothing. A wait
// past the deadline ends the program: NetworkError's exit code, one line naming step, unit, collective, group
// and the ranks that did not arrive.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/device.h"
#include "backend/tensor.h"

namespace strata {

enum class Collective : std::uint8_t { all_gather, reduce_scatter, all_reduce, broadcast, count_ };
const char* name_of(Collective);

// Which account a collective's bytes go to. `training` must equal the plan of equations 1 to 5 exactly.
enum class Traffic : std::uint8_t { training, edge, control, evaluation, checkpoint, count_ };

// What a collective is for: accounts, status records and the report of a passed deadline.
struct CollectiveLabel {
  Traffic traffic = Traffic::training;
  std::string unit;       // "decoder.3", or what the control plane does
  std::int64_t step = 0;  // optimizer step; 0 before the first
};

// Payload bytes this rank received and sent, by traffic and collective; self-to-self copies do not count.
struct ByteCounters {
  struct Entry {
    std::int64_t received = 0, sent = 0, calls = 0;
  };
  std::array<std::array<Entry, static_cast<int>(Collective::count_)>, static_cast<int>(Traffic::count_)>
      entries{};
  Entry& at(Traffic t, Collective c) { return entries[static_cast<int>(t)][static_cast<int>(c)]; }
  const Entry& at(Traffic t, Collective c) const { return entries[static_cast<int>(t)][static_cast<int>(c)]; }
};

// `once`: see above. `hop`: every partial sum is rounded to the wire dtype, as a ring over a bf16 type does.
enum class ReduceRounding : std::uint8_t { once, hop };
struct ReduceOptions {
  ReduceRounding rounding = ReduceRounding::once;
  int imitate_hops =
      0;  // with hop: each contribution enters in ceil(imitate_hops / n) equal parts; 0: n hops
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // within the group
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;  // "shard", "replicate", "federate", "group", "world"
  virtual const std::vector<int>& world_ranks() const = 0;  // members in group order

  // full (size * shard.count) receives every rank's shard in rank order. shard may lie inside full at its own
  // place.
  virtual void all_gather(Stream&, const CollectiveLabel&, Flat full, ConstFlat shard) = 0;
  // shard = sum over ranks of their full[rank * shard.count ...]. full.dtype is the wire dtype (fp32, bf16,
  // fp64); shard may be fp32 with a bf16 wire.
  virtual void reduce_scatter(Stream&, const CollectiveLabel&, Flat shard, ConstFlat full, ReduceOptions) = 0;
  // data = sum over ranks, in place. Any count, also smaller than the group.
  virtual void all_reduce_sum(Stream&, const CollectiveLabel&, Flat data, ReduceOptions) = 0;
  // data = sum_i weights[i] data_i / sum_i weights[i]; weights (size) int64 in device memory, nullptr: equal.
  virtual void all_reduce_mean(Stream&, const CollectiveLabel&, Flat data, const std::int64_t* weights,
                               ReduceOptions) = 0;
  // Elementwise maximum, for the control plane: fp64 only.
  virtual void all_reduce_max(Stream&, const CollectiveLabel&, Flat data) = 0;
  virtual void broadcast(Stream&, const CollectiveLabel&, Flat data, int root) = 0;

  virtual ByteCounters counters() const = 0;  // a snapshot; complete once the streams are synchronised
};

// All ranks of the program. Lives as long as its communicators.
class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Collective over the members, which all pass the same list (world ranks in group order, this rank among
  // them).
  virtual std::unique_ptr<Communicator> group(const std::string& name, const std::vector<int>& ranks) = 0;
  // Host-side helpers for start-up and checkpoints (they block, politely, with the deadline). The label's
  // unit is what they are for: "checkpoint". Their bytes are not counted.
  virtual void barrier(const CollectiveLabel&) = 0;
  // Every rank's string, in rank order.
  virtual std::vector<std::string> gather_strings(const CollectiveLabel&, const std::string& mine) = 0;
};

}  // namespace strata
