#pragma once
// A world whose ranks are threads of the test: run_ranks(n, body) calls body(world) on n threads, each of
// which makes its own CPU device. Collectives follow the Communicator's contract by meeting in shared memory:
// sums in rank order, fp32 in fp64 and bf16 in fp32; bytes are counted as if chunks had been sent.
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/communicator.h"
#include "backend/cpu/device.h"
#include "base/error.h"

namespace strata {

inline double read_element(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::bf16:
      return to_float(static_cast<const bf16*>(data)[i]);
    case DType::f64:
      return static_cast<const double*>(data)[i];
    default:
      throw InternalError("thread world: no arithmetic on this dtype");
  }
}
inline void write_element(void* data, DType dtype, std::int64_t i, double value) {
  if (dtype == DType::f32) static_cast<float*>(data)[i] = static_cast<float>(value);
  if (dtype == DType::bf16) static_cast<bf16*>(data)[i] = to_bf16(static_cast<float>(value));
  if (dtype == DType::f64) static_cast<double*>(data)[i] = value;
}

// One collective: members arrive with their input, compute their output aside, and write it once all have
// computed, since input and output may be the same memory.
struct ThreadMeeting {
  explicit ThreadMeeting(int n) : inputs(static_cast<std::size_t>(n)) {}
  std::vector<ConstFlat> inputs;
  std::atomic<int> arrived{0}, computed{0};
};

struct ThreadHub {
  explicit ThreadHub(int n) : size(n) {}
  std::shared_ptr<ThreadMeeting> meeting(const std::string& key, int n) {
    const std::lock_guard lock(mutex);
    auto& entry = meetings[key];
    if (!entry.first) entry.first = std::make_shared<ThreadMeeting>(n);
    auto found = entry.first;
    if (++entry.second == n) meetings.erase(key);
    return found;
  }
  // Everybody's string, in rank order, once all have come to their `turn`-th exchange.
  std::vector<std::string> exchange(std::int64_t turn, int rank, const std::string& mine) {
    std::unique_lock lock(mutex);
    auto& all = strings[turn];
    all.resize(static_cast<std::size_t>(size));
    all[static_cast<std::size_t>(rank)] = mine;
    ++told[turn];
    while (told[turn] < size) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      lock.lock();
      if (failed) throw InternalError("thread world: another rank has failed");
    }
    return strings[turn];
  }
  std::map<std::int64_t, std::vector<std::string>> strings;
  std::map<std::int64_t, int> told;
  const int size;
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::map<std::string, std::pair<std::shared_ptr<ThreadMeeting>, int>> meetings;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(ThreadHub& hub, std::string name, std::vector<int> ranks, int world_rank)
      : hub_(hub), name_(std::move(name)), ranks_(std::move(ranks)) {
    key_ = name_;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      key_ += "," + std::to_string(ranks_[i]);
      if (ranks_[i] == world_rank) me_ = static_cast<int>(i);
    }
  }
  int rank() const override { return me_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  const std::string& name() const override { return name_; }
  const std::vector<int>& world_ranks() const override { return ranks_; }
  ByteCounters counters() const override { return *counters_; }

  void all_gather(Stream& s, const CollectiveLabel& label, Flat full, ConstFlat shard) override {
    require(full.count == shard.count * size() && full.dtype == shard.dtype, "all_gather", label);
    count(label, Collective::all_gather, (size() - 1) * shard.bytes());
    enqueue(s, shard, full, [n = shard.count](const ThreadMeeting& m, Flat out) {
      for (std::size_t i = 0; i < m.inputs.size(); ++i)
        std::memcpy(out.at(static_cast<std::int64_t>(i) * n), m.inputs[i].data,
                    static_cast<std::size_t>(m.inputs[i].bytes()));
    });
  }
  void reduce_scatter(Stream& s, const CollectiveLabel& label, Flat shard, ConstFlat full,
                      ReduceOptions) override {
    require(full.count == shard.count * size() && (full.dtype == shard.dtype || shard.dtype == DType::f32),
            "reduce_scatter", label);
    count(label, Collective::reduce_scatter,
          (size() - 1) * shard.count * static_cast<std::int64_t>(size_of(full.dtype)));
    enqueue(s, full, shard,
            [this](const ThreadMeeting& m, Flat out) { add(m, out, me_ * out.count, nullptr); });
  }
  void all_reduce_sum(Stream& s, const CollectiveLabel& label, Flat data, ReduceOptions) override {
    count_all_reduce(label, data);
    enqueue(s, data, data, [this](const ThreadMeeting& m, Flat out) { add(m, out, 0, nullptr); });
  }
  void all_reduce_mean(Stream& s, const CollectiveLabel& label, Flat data, const std::int64_t* weights,
                       ReduceOptions) override {
    count_all_reduce(label, data);
    static const std::vector<std::int64_t> ones(64, 1);
    enqueue(s, data, data,
            [this, w = weights != nullptr ? weights : ones.data()](const ThreadMeeting& m, Flat out) {
              add(m, out, 0, w);
            });
  }
  void all_reduce_max(Stream& s, const CollectiveLabel& label, Flat data) override {
    count_all_reduce(label, data);
    enqueue(s, data, data, [](const ThreadMeeting& m, Flat out) {
      for (std::int64_t i = 0; i < out.count; ++i) {
        double largest = read_element(m.inputs[0].data, DType::f64, i);
        for (const ConstFlat& in : m.inputs)
          largest = std::max(largest, read_element(in.data, DType::f64, i));
        write_element(out.data, DType::f64, i, largest);
      }
    });
  }
  void broadcast(Stream& s, const CollectiveLabel& label, Flat data, int root) override {
    count(label, Collective::broadcast, me_ == root ? 0 : data.bytes());
    enqueue(s, data, data, [root](const ThreadMeeting& m, Flat out) {
      std::memcpy(out.data, m.inputs[static_cast<std::size_t>(root)].data,
                  static_cast<std::size_t>(out.bytes()));
    });
  }

 private:
  using Compute = std::function<void(const ThreadMeeting&, Flat out)>;

  class Operation final : public AsyncOperation {
   public:
    Operation(ThreadHub& hub, std::shared_ptr<ThreadMeeting> meeting, int me, ConstFlat in, Flat out,
              Compute compute)
        : hub_(hub),
          meeting_(std::move(meeting)),
          me_(me),
          in_(in),
          out_(out),
          compute_(std::move(compute)) {}
    void start() override {
      meeting_->inputs[static_cast<std::size_t>(me_)] = in_;
      ++meeting_->arrived;
    }
    Progress progress() override {
      if (hub_.failed) throw NetworkError("thread world: another rank failed");
      const int n = static_cast<int>(meeting_->inputs.size());
      if (!result_ && meeting_->arrived == n) {
        result_ = std::make_unique<std::vector<std::byte>>(static_cast<std::size_t>(out_.bytes()));
        compute_(*meeting_, {result_->data(), out_.dtype, out_.count});
        ++meeting_->computed;
      }
      if (!result_ || meeting_->computed != n) return Progress::none;
      std::memcpy(out_.data, result_->data(), result_->size());
      return Progress::done;
    }

   private:
    ThreadHub& hub_;
    std::shared_ptr<ThreadMeeting> meeting_;
    int me_;
    ConstFlat in_;
    Flat out_;
    Compute compute_;
    std::unique_ptr<std::vector<std::byte>> result_;
  };

  void enqueue(Stream& stream, ConstFlat in, Flat out, Compute compute) {
    auto meeting = hub_.meeting(key_ + "#" + std::to_string(sequence_++), size());
    cpu_stream(stream).run_async(
        std::make_unique<Operation>(hub_, std::move(meeting), me_, in, out, std::move(compute)));
  }

  // Sum of the inputs' elements from `offset`, or their weighted mean; rounded once.
  void add(const ThreadMeeting& m, Flat out, std::int64_t offset, const std::int64_t* weights) const {
    const bool narrow = m.inputs[0].dtype == DType::bf16;
    double total = 0;
    for (std::size_t r = 0; weights != nullptr && r < m.inputs.size(); ++r)
      total += static_cast<double>(weights[r]);
    for (std::int64_t i = 0; i < out.count; ++i) {
      double wide = 0;
      float small = 0;
      for (std::size_t r = 0; r < m.inputs.size(); ++r) {
        const double x = read_element(m.inputs[r].data, m.inputs[r].dtype, offset + i) *
                         (weights != nullptr ? static_cast<double>(weights[r]) : 1.0);
        wide += x;
        small += static_cast<float>(x);
      }
      const double sum = narrow ? small : wide;
      write_element(out.data, out.dtype, i, weights != nullptr ? sum / total : sum);
    }
  }

  void require(bool good, const char* what, const CollectiveLabel& label) const {
    if (!good)
      throw InternalError(std::string("thread world: ") + what + " of " + label.unit + ": sizes or dtypes");
  }
  void count(const CollectiveLabel& label, Collective c, std::int64_t received) {
    auto& entry = counters_->at(label.traffic, c);
    entry.received += received;
    ++entry.calls;
  }
  // Own chunk from everyone, everyone's chunk; chunks differ by one element at most, larger ones first.
  void count_all_reduce(const CollectiveLabel& label, const Flat& data) {
    std::int64_t elements = 0;
    for (int r = 0; r < size(); ++r) {
      std::int64_t chunk = 0;
      for (std::int64_t i = r; i < data.count; i += size()) ++chunk;
      elements += r == me_ ? (size() - 1) * chunk : chunk;
    }
    count(label, Collective::all_reduce, elements * static_cast<std::int64_t>(size_of(data.dtype)));
  }

  ThreadHub& hub_;
  std::string name_, key_;
  std::vector<int> ranks_;
  int me_ = 0;
  std::int64_t sequence_ = 0;
  std::unique_ptr<ByteCounters> counters_ = std::make_unique<ByteCounters>();
};

class ThreadWorld final : public World {
 public:
  ThreadWorld(ThreadHub& hub, int rank) : hub_(hub), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_.size; }
  std::unique_ptr<Communicator> group(const std::string& name, const std::vector<int>& ranks) override {
    return std::make_unique<ThreadCommunicator>(hub_, name, ranks, rank_);
  }
  void barrier(const CollectiveLabel& label) override { gather_strings(label, ""); }
  std::vector<std::string> gather_strings(const CollectiveLabel&, const std::string& mine) override {
    return hub_.exchange(exchanges_++, rank_, mine);
  }

 private:
  ThreadHub& hub_;
  int rank_;
  std::int64_t exchanges_ = 0;
};

// Rethrows the first error of any rank. Catch2's assertions are not thread-safe: body returns what is
// checked.
inline void run_ranks(int n, const std::function<void(World&)>& body) {
  ThreadHub hub(n);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      try {
        ThreadWorld world(hub, r);
        body(world);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!hub.failed.exchange(true)) first = std::current_exception();
      }
    });
  for (auto& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace strata
