// MpiCommunicator and MpiWorld: arguments checked, groups of one served without messages, the rest handed to
// the operations.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "backend/mpi/operation.h"
#include "base/error.h"

namespace strata {
namespace mpi {
namespace {

[[noreturn]] void refuse(const Group& group, const CollectiveLabel& label, const std::string& what) {
  throw InternalError(fmt::format("unit {}, group {} of {}: {}", label.unit, group.name, group.size(), what));
}

// A group of one: the "sum" of one contribution, in the output's dtype.
void copy_or_widen(Flat out, ConstFlat in) {
  if (out.data == in.data || in.count == 0) return;
  if (out.dtype == in.dtype) {
    std::memcpy(out.data, in.data, static_cast<std::size_t>(in.bytes()));
  } else {
    const void* const one[] = {in.data};
    reduce_in_rank_order(out, in.dtype, one, {});
  }
}

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  int rank() const override { return group_->me; }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name; }
  const std::vector<int>& world_ranks() const override { return group_->ranks; }
  ByteCounters counters() const override {
    const std::lock_guard lock(group_->mutex);
    return group_->counters;
  }

  void all_gather(Stream& stream, const CollectiveLabel& label, Flat full, ConstFlat shard) override {
    if (full.count != shard.count * size() || full.dtype != shard.dtype)
      refuse(*group_, label,
             fmt::format("all_gather of {} {} into {} {} -> full holds size() shards of the same dtype",
                         shard.count, strata::name_of(shard.dtype), full.count, strata::name_of(full.dtype)));
    CpuStream& s = cpu_stream(stream);
    if (size() == 1) return s.run([=] { copy_or_widen(full, shard); });
    s.run_async(make_all_gather(group_, label, full, shard));
  }

  void reduce_scatter(Stream& stream, const CollectiveLabel& label, Flat shard, ConstFlat full,
                      ReduceOptions options) override {
    const bool dtypes = shard.dtype == full.dtype || (shard.dtype == DType::f32 && full.dtype == DType::bf16);
    if (full.count != shard.count * size() || !dtypes || !addable(full.dtype))
      refuse(*group_, label,
             fmt::format(
                 "reduce_scatter of {} {} into {} {} -> full holds size() shards in fp32, bf16 or fp64, the "
                 "shard the same dtype or fp32",
                 full.count, strata::name_of(full.dtype), shard.count, strata::name_of(shard.dtype)));
    CpuStream& s = cpu_stream(stream);
    if (size() == 1) return s.run([=] { copy_or_widen(shard, full); });
    ReduceCall call;
    call.collective = Collective::reduce_scatter;
    call.out = shard, call.in = full, call.options = options;
    s.run_async(make_reduce(group_, label, call));
  }

  void all_reduce_sum(Stream& stream, const CollectiveLabel& label, Flat data,
                      ReduceOptions options) override {
    all_reduce(stream, label, data, ReduceRule::Kind::sum, options, nullptr);
  }
  void all_reduce_mean(Stream& stream, const CollectiveLabel& label, Flat data, const std::int64_t* weights,
                       ReduceOptions options) override {
    all_reduce(stream, label, data, ReduceRule::Kind::mean, options, weights);
  }
  void all_reduce_max(Stream& stream, const CollectiveLabel& label, Flat data) override {
    if (data.dtype != DType::f64)
      refuse(*group_, label, "all_reduce_max is for the control plane -> use fp64");
    all_reduce(stream, label, data, ReduceRule::Kind::max, {}, nullptr);
  }

  void broadcast(Stream& stream, const CollectiveLabel& label, Flat data, int root) override {
    if (root < 0 || root >= size())
      refuse(*group_, label, fmt::format("broadcast from rank {} -> root is a rank within the group", root));
    CpuStream& s = cpu_stream(stream);
    if (size() == 1) return;
    s.run_async(make_broadcast(group_, label, data, root));
  }

 private:
  static bool addable(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f64; }

  void all_reduce(Stream& stream, const CollectiveLabel& label, Flat data, ReduceRule::Kind kind,
                  ReduceOptions options, const std::int64_t* weights) {
    if (!addable(data.dtype))
      refuse(*group_, label,
             fmt::format("all_reduce of {} -> use fp32, bf16 or fp64", strata::name_of(data.dtype)));
    CpuStream& s = cpu_stream(stream);
    if (size() == 1) return;
    ReduceCall call;
    call.out = data, call.in = data, call.kind = kind, call.options = options, call.weights = weights;
    s.run_async(make_reduce(group_, label, call));
  }

  std::shared_ptr<Group> group_;
};

class MpiWorld final : public World {
 public:
  MpiWorld(MpiSession& session, CpuDevice& device, const MpiOptions& options)
      : context_(std::make_shared<Context>(session, device, options)),
        stream_(cpu_stream(device.create_stream("control", Device::StreamKind::transfer))) {
    std::vector<int> everyone;
    for (int r = 0; r < session.size(); ++r) everyone.push_back(r);
    world_ = members("world", everyone);
    if (session.size() > 1) {
      device.set_idle_hook(
          [observer = options.observer] {
            deliver();
            if (observer != nullptr) observer->alive();
          },
          5e-3);
    }
  }
  ~MpiWorld() override { context_->device.set_idle_hook(nullptr, 1); }

  int rank() const override { return context_->session.rank(); }
  int size() const override { return context_->session.size(); }

  std::unique_ptr<Communicator> group(const std::string& name, const std::vector<int>& ranks) override {
    std::shared_ptr<Group> made = members(name, ranks);
    // The members take the largest of the numbers that each of them has free.
    const std::string mine = fmt::format("{} [{}]", name, fmt::join(ranks, " "));
    const auto all = exchange(made, fmt::format("creation of {}", mine), {Traffic::control, "mesh", 0},
                              fmt::format("{}:{}", next_id_, mine));
    for (std::size_t p = 0; p < all.size(); ++p) {
      const std::size_t colon = all[p].find(':');
      if (all[p].substr(colon + 1) != mine)
        throw UsageError(
            fmt::format("rank {} makes group {} where rank {} makes {} -> start all ranks with the same "
                        "configuration",
                        rank(), mine, ranks[p], all[p].substr(colon + 1)));
      made->id = std::max(made->id, std::stoi(all[p].substr(0, colon)));
    }
    next_id_ = made->id + 1;
    if (next_id_ > kMaxGroups)
      throw InternalError(fmt::format("more than {} groups -> make a mesh's groups once", kMaxGroups - 1));
    return std::make_unique<MpiCommunicator>(std::move(made));
  }

  void barrier(const CollectiveLabel& label) override { exchange(world_, "barrier", label, ""); }

  std::vector<std::string> gather_strings(const CollectiveLabel& label, const std::string& mine) override {
    return exchange(world_, "gathering of strings", label, mine);
  }

 private:
  // MPI moves what it has buffered only inside its calls.
  static void deliver() {
    int found = 0;
    STRATA_MPI(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE));
  }

  std::shared_ptr<Group> members(const std::string& name, const std::vector<int>& ranks) const {
    auto made = std::make_shared<Group>();
    made->context = context_;
    made->name = name;
    made->ranks = ranks;
    std::vector<int> sorted = ranks;
    std::sort(sorted.begin(), sorted.end());
    const auto me = std::find(ranks.begin(), ranks.end(), rank());
    const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
    if (me == ranks.end() || !distinct || sorted.front() < 0 || sorted.back() >= size())
      throw InternalError(
          fmt::format("group {} [{}] of a world of {}, on rank {} -> list distinct world ranks, this "
                      "one among them",
                      name, fmt::join(ranks, " "), size(), rank()));
    made->me = static_cast<int>(me - ranks.begin());
    return made;
  }

  std::vector<std::string> exchange(const std::shared_ptr<Group>& group, const std::string& what,
                                    const CollectiveLabel& label, const std::string& mine) {
    if (group->size() == 1) return {mine};
    std::vector<std::string> all;
    stream_.run_async(make_exchange(group, what, label, mine, &all));
    context_->device.synchronize(context_->device.record(stream_));
    return all;
  }

  std::shared_ptr<Context> context_;
  CpuStream& stream_;
  std::shared_ptr<Group> world_;
  int next_id_ = 1;  // 0: the control plane's fixed tags
};

}  // namespace
}  // namespace mpi

std::unique_ptr<World> make_mpi_world(MpiSession& session, CpuDevice& device, const MpiOptions& options) {
  return std::make_unique<mpi::MpiWorld>(session, device, options);
}

}  // namespace strata
