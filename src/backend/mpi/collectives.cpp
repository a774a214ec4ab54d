// The collectives as state machines over point-to-point messages.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "backend/mpi/operation.h"
#include "backend/mpi/wire_plan.h"
#include "base/error.h"

namespace strata::mpi {
namespace {

// An operation that is one of the Communicator's collectives: accounted.
class CollectiveOperation : public Operation {
 public:
  CollectiveOperation(const std::shared_ptr<Group>& group, Collective collective,
                      const CollectiveLabel& label)
      : Operation(group, name_of(collective), label), collective_(collective), traffic_(label.traffic) {}

 protected:
  void account() final {
    const std::lock_guard lock(group_->mutex);
    auto& entry = group_->counters.at(traffic_, collective_);
    entry.received += transfers_.received_bytes();
    entry.sent += transfers_.sent_bytes();
    ++entry.calls;
  }

 private:
  Collective collective_;
  Traffic traffic_;
};

// Every rank sends its shard to every other one.
class AllGather final : public CollectiveOperation {
 public:
  AllGather(const std::shared_ptr<Group>& group, const CollectiveLabel& label, Flat full, ConstFlat shard)
      : CollectiveOperation(group, Collective::all_gather, label), full_(full), shard_(shard) {}

 private:
  void begin() override {
    const std::int64_t n = shard_.count;
    for (int i = 1; i < group_->size(); ++i) {
      const int from = peer_after(group_->size() - i);
      transfers_.receive(full_.at(from * n), shard_.bytes(), from, 0);
    }
    for (int i = 1; i < group_->size(); ++i) transfers_.send(shard_.data, shard_.bytes(), peer_after(i), 0);
    void* own = full_.at(group_->me * n);
    if (own != shard_.data && n > 0) std::memcpy(own, shard_.data, static_cast<std::size_t>(shard_.bytes()));
  }
  void arrived(const Transfers::Received&) override {}
  Progress advance() override { return Progress::done; }

  Flat full_;
  ConstFlat shard_;
};

// Phase 0: every rank sends chunk q to rank q, in slices; rank q adds slice after slice in rank order.
// Phase 1 (all_reduce): rank q sends every finished slice to all. A chunk is received in place only once this
// rank's own version of it has left.
class Reduce final : public CollectiveOperation {
 public:
  Reduce(const std::shared_ptr<Group>& group, const CollectiveLabel& label, const ReduceCall& call)
      : CollectiveOperation(group, call.collective, label),
        call_(call),
        gathers_(call.collective == Collective::all_reduce),
        in_(call.in),
        own_(chunk_of(in_.count, group_->size(), group_->me)),
        slice_(slice_elements()),
        slices_(slices_of(own_)),
        fetched_(static_cast<std::size_t>(group_->size())) {
    fetched_[static_cast<std::size_t>(group_->me)] = true;
  }

 private:
  // The same on all ranks. Two slices of every peer are in flight at a time.
  std::int64_t slice_elements() const {
    const MpiOptions& options = group_->context->options;
    return reduction_slice(in_.dtype, group_->size(), options.message_bytes, options.scratch_bytes);
  }
  // An empty chunk has one empty slice: its messages say that the sender has arrived.
  std::int64_t slices_of(Chunk chunk) const {
    return std::max<std::int64_t>(1, (chunk.count + slice_ - 1) / slice_);
  }
  Chunk slice_of(Chunk chunk, std::int64_t k) const {
    return {chunk.begin + k * slice_, std::min(slice_, chunk.count - k * slice_)};
  }
  ConstFlat part(Chunk chunk) const { return in_.slice(chunk.begin, chunk.count); }

  void begin() override {
    if (call_.weights != nullptr) weights_.assign(call_.weights, call_.weights + group_->size());
    const MpiOptions& options = group_->context->options;
    const ReductionScratch scratch = reduction_scratch(in_.count, in_.dtype, group_->size(), group_->me,
                                                       options.message_bytes, options.scratch_bytes);
    stride_ = scratch.stride, windows_ = static_cast<int>(scratch.windows);
    if (scratch.bytes > 0)
      scratch_ = group_->context->scratch.acquire(static_cast<std::size_t>(scratch.bytes));
    for (std::int64_t k = 0; k < windows_; ++k) receive_slice(k);
    bool more = true;
    for (std::int64_t k = 0; more; ++k) {
      more = false;
      for (int i = 1; i < group_->size(); ++i) {
        const int peer = peer_after(i);
        const Chunk chunk = chunk_of(in_.count, group_->size(), peer);
        if (k >= slices_of(chunk)) continue;
        more = true;
        const ConstFlat slice = part(slice_of(chunk, k));
        transfers_.send(slice.data, slice.bytes(), peer, 0);
      }
    }
  }

  char* scratch_of(std::int64_t k, int peer) const {
    return scratch_.data() + ((k % windows_) * group_->size() + peer) * stride_;
  }

  void receive_slice(std::int64_t k) {
    const std::int64_t bytes = part(slice_of(own_, k)).bytes();
    waiting_[k % 2] = group_->size() - 1;
    for (int i = 1; i < group_->size(); ++i) {
      const int peer = peer_after(group_->size() - i);
      transfers_.receive(bytes == 0 ? nullptr : scratch_of(k, peer), bytes, peer, 0, k);
    }
  }

  void arrived(const Transfers::Received& message) override {
    if (message.slice >= 0) --waiting_[message.slice % 2];
  }

  Progress advance() override {
    // One slice a call: other operations are polled between slices.
    bool moved = false;
    if (summed_ < slices_ && waiting_[summed_ % 2] == 0) {
      sum_slice(summed_++);
      moved = true;
    }
    if (gathers_) fetch_chunks();
    if (summed_ == slices_ && (!gathers_ || fetched_count_ == group_->size() - 1)) return Progress::done;
    return moved ? Progress::some : Progress::none;
  }

  void sum_slice(std::int64_t k) {
    const Chunk chunk = slice_of(own_, k);
    if (chunk.count > 0) {
      contributions_.resize(static_cast<std::size_t>(group_->size()));
      for (int r = 0; r < group_->size(); ++r)
        contributions_[static_cast<std::size_t>(r)] =
            r == group_->me ? in_.at(chunk.begin) : scratch_of(k, r);
      const Flat out = call_.out.slice(gathers_ ? chunk.begin : k * slice_, chunk.count);
      reduce_in_rank_order(out, in_.dtype, contributions_, {call_.kind, call_.options, weights_});
      if (gathers_)
        for (int i = 1; i < group_->size(); ++i) transfers_.send(out.data, out.bytes(), peer_after(i), 1);
    }
    if (k + windows_ < slices_) receive_slice(k + windows_);
  }

  void fetch_chunks() {
    for (int i = 1; i < group_->size() && fetched_count_ < group_->size() - 1; ++i) {
      const int peer = peer_after(group_->size() - i);
      auto fetched = fetched_[static_cast<std::size_t>(peer)];
      if (fetched || transfers_.sending_to(peer, 0)) continue;
      const Chunk chunk = chunk_of(in_.count, group_->size(), peer);
      for (std::int64_t k = 0; chunk.count > 0 && k < slices_of(chunk); ++k) {
        const Chunk slice = slice_of(chunk, k);
        const Flat to = call_.out.slice(slice.begin, slice.count);
        transfers_.receive(to.data, to.bytes(), peer, 1, -1);
      }
      fetched_[static_cast<std::size_t>(peer)] = true;
      ++fetched_count_;
    }
  }

  ReduceCall call_;
  bool gathers_;
  ConstFlat in_;
  Chunk own_;
  std::int64_t slice_, slices_;  // elements of a slice; slices of this rank's chunk
  std::int64_t stride_ = 0;      // bytes of a slice in scratch
  int windows_ = 1;
  std::int64_t summed_ = 0;
  int waiting_[2] = {0, 0};  // peers whose part of the slice is still to come, by slice mod 2
  std::vector<bool> fetched_;
  int fetched_count_ = 0;
  std::vector<std::int64_t> weights_;
  std::vector<const void*> contributions_;
  ScratchPool::Lease scratch_;
};

// Small or to one peer: root sends to all. Otherwise root cuts the data among the others, who pass their
// parts on: nobody sends or receives more than the data once.
class Broadcast final : public CollectiveOperation {
 public:
  Broadcast(const std::shared_ptr<Group>& group, const CollectiveLabel& label, Flat data, int root)
      : CollectiveOperation(group, Collective::broadcast, label),
        data_(data),
        root_(root),
        flat_(data.bytes() <= kFlatBroadcastBytes || group_->size() == 2),
        slice_(std::max<std::int64_t>(
            1, group_->context->options.message_bytes / static_cast<std::int64_t>(size_of(data.dtype)))) {}

 private:
  // Member that passes on part `place`, and back.
  int passer(int place) const { return (root_ + 1 + place) % group_->size(); }
  Chunk part(int place) const { return chunk_of(data_.count, group_->size() - 1, place); }
  Flat slice_of(Chunk chunk, std::int64_t k) const {
    return data_.slice(chunk.begin + k * slice_, std::min(slice_, chunk.count - k * slice_));
  }
  std::int64_t slices_of(Chunk chunk) const { return (chunk.count + slice_ - 1) / slice_; }

  void begin() override {
    const int n = group_->size(), me = group_->me;
    if (flat_) {
      if (me != root_) return transfers_.receive(data_.data, data_.bytes(), root_, 0, -1);
      for (int i = 1; i < n; ++i) transfers_.send(data_.data, data_.bytes(), peer_after(i), 0);
      return;
    }
    for (int place = 0; place < n - 1; ++place) {
      const int passes = passer(place);
      const Chunk chunk = part(place);
      for (std::int64_t k = 0; k < slices_of(chunk); ++k) {
        const Flat slice = slice_of(chunk, k);
        if (me == root_) {
          transfers_.send(slice.data, slice.bytes(), passes, 0);
        } else if (me == passes) {
          own_ = chunk;
          arrived_.assign(static_cast<std::size_t>(slices_of(chunk)), false);
          transfers_.receive(slice.data, slice.bytes(), root_, 0, k);
        } else {
          transfers_.receive(slice.data, slice.bytes(), passes, 1, -1);
        }
      }
    }
  }

  // Slices may arrive out of order, but leave in order: that is how the others have posted their receives.
  void arrived(const Transfers::Received& message) override {
    if (message.slice >= 0) arrived_[static_cast<std::size_t>(message.slice)] = true;
  }
  Progress advance() override {
    for (; passed_ < arrived_.size() && arrived_[passed_]; ++passed_) {
      const Flat slice = slice_of(own_, static_cast<std::int64_t>(passed_));
      for (int i = 1; i < group_->size(); ++i)
        if (peer_after(i) != root_) transfers_.send(slice.data, slice.bytes(), peer_after(i), 1);
    }
    return passed_ == arrived_.size() ? Progress::done : Progress::none;
  }

  Flat data_;
  int root_;
  bool flat_;
  std::int64_t slice_;
  Chunk own_;
  std::vector<bool> arrived_;  // slices of own_
  std::size_t passed_ = 0;     // of them, passed on
};

// Lengths first, then the strings. Tags are fixed: hosts make these calls one after the other.
class Exchange final : public Operation {
 public:
  Exchange(std::shared_ptr<Group> group, const std::string& what, const CollectiveLabel& label,
           std::string mine, std::vector<std::string>* all)
      : Operation(std::move(group), what, label), mine_(std::move(mine)), all_(all) {
    use_fixed_tags();
  }

 private:
  void begin() override {
    const int n = group_->size();
    lengths_.assign(static_cast<std::size_t>(n), 0);
    all_->assign(static_cast<std::size_t>(n), "");
    (*all_)[static_cast<std::size_t>(group_->me)] = mine_;
    length_ = static_cast<std::int64_t>(mine_.size());
    for (int i = 1; i < n; ++i) {
      const int from = peer_after(n - i);
      transfers_.receive(&lengths_[static_cast<std::size_t>(from)], sizeof length_, from, 0, 0);
    }
    for (int i = 1; i < n; ++i) {
      transfers_.send(&length_, sizeof length_, peer_after(i), 0);
      if (length_ > 0) transfers_.send(mine_.data(), length_, peer_after(i), 1);
    }
  }
  void arrived(const Transfers::Received& message) override {
    const std::int64_t length = lengths_[static_cast<std::size_t>(message.peer)];
    if (message.slice != 0 || length == 0) return;
    std::string& text = (*all_)[static_cast<std::size_t>(message.peer)];
    text.resize(static_cast<std::size_t>(length));
    transfers_.receive(text.data(), length, message.peer, 1, 1);
  }
  Progress advance() override { return Progress::done; }

  std::string mine_;
  std::vector<std::string>* all_;
  std::vector<std::int64_t> lengths_;
  std::int64_t length_ = 0;
};

}  // namespace

std::unique_ptr<AsyncOperation> make_all_gather(const std::shared_ptr<Group>& group,
                                                const CollectiveLabel& label, Flat full, ConstFlat shard) {
  return std::make_unique<AllGather>(group, label, full, shard);
}
std::unique_ptr<AsyncOperation> make_reduce(const std::shared_ptr<Group>& group, const CollectiveLabel& label,
                                            const ReduceCall& call) {
  return std::make_unique<Reduce>(group, label, call);
}
std::unique_ptr<AsyncOperation> make_broadcast(const std::shared_ptr<Group>& group,
                                               const CollectiveLabel& label, Flat data, int root) {
  return std::make_unique<Broadcast>(group, label, data, root);
}
std::unique_ptr<AsyncOperation> make_exchange(std::shared_ptr<Group> group, const std::string& what,
                                              const CollectiveLabel& label, std::string mine,
                                              std::vector<std::string>* all) {
  return std::make_unique<Exchange>(std::move(group), what, label, std::move(mine), all);
}

}  // namespace strata::mpi
