#pragma once
// What all operations over MPI share: their group, their messages, the deadline.
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "backend/cpu/device.h"
#include "backend/mpi/reduce_kernel.h"
#include "backend/mpi/scratch.h"
#include "backend/mpi/session.h"
#include "backend/mpi/transfers.h"

namespace strata::mpi {

// Shared by a world, its groups and their operations.
struct Context {
  Context(MpiSession& s, CpuDevice& d, const MpiOptions& o);
  MpiSession& session;
  CpuDevice& device;
  MpiOptions options;
  int sequence_numbers = 0;  // operations of a group that tags can tell apart
  ScratchPool scratch;       // after device
};

// Members of a group as its operations see them.
struct Group {
  std::shared_ptr<Context> context;
  std::string name;
  std::vector<int> ranks;  // world ranks by member
  int me = 0;
  int id = 0;                // differs from the id of every other group that shares two members with this one
  std::int64_t started = 0;  // operations; by the thread that runs them

  mutable std::mutex mutex;  // guards counters
  ByteCounters counters;

  int size() const { return static_cast<int>(ranks.size()); }
};

constexpr int kMaxGroups = 256;

// Messages of an operation carry a tag made of group, sequence number and phase, so that operations of one
// group may overlap and go through their phases at different times on different ranks.
class Operation : public AsyncOperation {
 public:
  // what, label: as the observer and the report of a passed deadline tell them.
  Operation(std::shared_ptr<Group> group, std::string what, CollectiveLabel label);

  void start() final;
  Progress progress() final;

 protected:
  virtual void begin() = 0;  // posts the first messages
  // Reacts to a message that has arrived.
  virtual void arrived(const Transfers::Received& message) = 0;
  // Does what has become possible. done: nothing is left to post.
  virtual Progress advance() = 0;
  virtual void account() {}  // once, at the end

  int peer_after(int i) const { return (group_->me + i) % group_->size(); }
  void use_fixed_tags() { fixed_tags_ = true; }

  std::shared_ptr<Group> group_;
  Transfers transfers_;

 private:
  [[noreturn]] void expire() const;
  void observe_wait();

  using Clock = std::chrono::steady_clock;
  std::string what_;
  CollectiveLabel label_;
  int number_ = 0;  // the observer's
  bool fixed_tags_ = false;
  Clock::time_point last_poll_{};
  Clock::duration waited_{};  // without progress
  Clock::duration next_observed_{};
  std::vector<Transfers::Received> received_;
};

// The collectives. Buffers and `weights` are device memory, read from start on.
struct ReduceCall {
  Collective collective = Collective::all_reduce;
  Flat out;      // reduce_scatter: the shard; all_reduce: the data
  ConstFlat in;  // the full buffer
  ReduceRule::Kind kind = ReduceRule::Kind::sum;
  ReduceOptions options;
  const std::int64_t* weights = nullptr;
};
std::unique_ptr<AsyncOperation> make_all_gather(const std::shared_ptr<Group>&, const CollectiveLabel&,
                                                Flat full, ConstFlat shard);
std::unique_ptr<AsyncOperation> make_reduce(const std::shared_ptr<Group>&, const CollectiveLabel&,
                                            const ReduceCall&);
std::unique_ptr<AsyncOperation> make_broadcast(const std::shared_ptr<Group>&, const CollectiveLabel&,
                                               Flat data, int root);
// Control plane of the host: every member's string, by member, in `all`. `what` is its name in a report.
std::unique_ptr<AsyncOperation> make_exchange(std::shared_ptr<Group>, const std::string& what,
                                              const CollectiveLabel&, std::string mine,
                                              std::vector<std::string>* all);

}  // namespace strata::mpi
