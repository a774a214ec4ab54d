#pragma once
// How streams are run: the queues of tasks (Lanes), and the two schedulers that drive them. Internal to the
// CPU backend.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "backend/cpu/device.h"

namespace strata::cpu {

using Clock = std::chrono::steady_clock;

struct CpuEvent final : EventState {
  CpuEvent(const Scheduler* owner, int on_lane, std::uint64_t at)
      : scheduler(owner), lane(on_lane), position(at) {}
  void complete() {
    when = Clock::now();
    done.store(true, std::memory_order_release);
    done.notify_all();
  }
  bool is_done() const { return done.load(std::memory_order_acquire); }

  const Scheduler* scheduler;  // whose streams it belongs to
  int lane;
  std::uint64_t position;  // index of the record among its lane's tasks
  Clock::time_point when{};
  std::atomic<bool> done{false};
};
using CpuEventPtr = std::shared_ptr<CpuEvent>;

struct Task {
  enum class Kind : std::uint8_t { work, operation, record, wait } kind = Kind::work;
  std::unique_ptr<Work> work;
  std::unique_ptr<AsyncOperation> operation;
  CpuEventPtr event;         // record, wait
  std::uint64_t ticket = 0;  // operation: its place in the order of starts
  bool started = false;
};

// One queue of tasks for each stream, used by one thread. After a task has thrown, tasks are retired without
// being run.
class Lanes {
 public:
  struct Lane {
    std::deque<Task> tasks;
    std::uint64_t retired = 0;  // tasks that have left the queue
  };
  enum class Outcome { blocked, pending, moved, advanced };

  void push(int lane, Task task);
  // Runs, starts or polls the first task of a lane. pending, moved: an operation is in flight and not done
  // yet (moved: but has got further).
  Outcome advance(int lane);
  bool in_flight(int lane) const;
  bool runnable(int lane) const;  // advance would not be blocked
  bool empty() const { return queued_ == 0; }
  int size() const { return static_cast<int>(lanes_.size()); }
  const Lane& at(int lane) const { return lanes_[static_cast<std::size_t>(lane)]; }
  std::uint64_t next_ticket() const { return next_ticket_; }
  std::exception_ptr failure() const { return failure_; }
  void fail(std::exception_ptr error) {
    if (!failure_) failure_ = std::move(error);
  }

 private:
  void retire(Lane& lane);

  std::deque<Lane> lanes_;
  std::size_t queued_ = 0;
  std::uint64_t next_ticket_ = 0;  // the operation that may start next
  std::exception_ptr failure_;
};

// Yields some dozen times, then rests, because a waiting rank must not take the core of a working one: at
// first 50 us at a time and, once the wait has turned out a long one, 200 us after every four polls. Waking
// costs more than polling, and a transport over TCP moves a bounded number of bytes a poll.
class PoliteWait {
 public:
  void pause();
  void reset() { turns_ = 0; }
  bool yielding() const { return turns_ < kYields; }
  // For a caller that rests in its own way: how long, this time. 0: poll again at once.
  std::chrono::microseconds next_rest();

 private:
  static constexpr int kYields = 50;
  static constexpr int kShortRests = 16;
  static constexpr int kPolls = 4;  // between two long rests

  int turns_ = 0;
};

class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual bool runs_inline(bool transfer) const = 0;
  int add_lane() { return lanes_++; }
  void enqueue(int lane, Task task);  // numbers operations and records, then submits
  CpuEventPtr record(int lane);
  CpuEventPtr record_inline();  // an event that is done already

  virtual void wait(int lane, bool lane_is_inline, const CpuEventPtr& event) = 0;
  virtual void synchronize(const CpuEventPtr& event) = 0;
  virtual void synchronize() = 0;
  virtual bool idle() const = 0;  // nothing enqueued that has not run
  virtual void fail(std::exception_ptr error) = 0;
  virtual void set_idle_hook(std::function<void()> hook, double seconds) = 0;

 protected:
  virtual void submit(int lane, Task task) = 0;

 private:
  int lanes_ = 0;
  std::uint64_t operations_ = 0;
  std::vector<std::uint64_t> pushed_;  // tasks ever enqueued, by lane
};

std::unique_ptr<Scheduler> make_eager_scheduler();
std::unique_ptr<Scheduler> make_deferred_scheduler(std::uint64_t seed);

}  // namespace strata::cpu
