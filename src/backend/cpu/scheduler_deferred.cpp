// Deferred mode: everything is recorded; the host's waits run it in a seeded legal order.
#include <algorithm>
#include <limits>
#include <random>

#include "backend/cpu/scheduler.h"
#include "base/error.h"
#include "base/log.h"

namespace strata::cpu {
namespace {

class DeferredScheduler final : public Scheduler {
 public:
  explicit DeferredScheduler(std::uint64_t seed) : random_(seed) {}

  ~DeferredScheduler() override {
    if (!lanes_.failure() || reported_) return;
    try {
      std::rethrow_exception(lanes_.failure());
    } catch (const std::exception& error) {
      log_error("deferred device: {} (no wait came after it)", error.what());
    } catch (...) {
      log_error("deferred device: recorded work threw and no wait came after it");
    }
  }

  bool runs_inline(bool) const override { return false; }

  void wait(int lane, bool, const CpuEventPtr& event) override {
    if (event->is_done()) return;
    Task task;
    task.kind = Task::Kind::wait;
    task.event = event;
    enqueue(lane, std::move(task));
  }

  void synchronize(const CpuEventPtr& event) override {
    if (!event->is_done()) {
      const bool late = draw(2) == 0;
      set_limits(late ? event.get() : nullptr);
      run_until([&event] { return event->is_done(); });
    }
    rethrow();
  }

  void synchronize() override {
    set_limits(nullptr);
    run_until([this] { return lanes_.empty(); });
    rethrow();
  }

  bool idle() const override { return lanes_.empty(); }
  void fail(std::exception_ptr error) override { lanes_.fail(std::move(error)); }
  void set_idle_hook(std::function<void()>, double) override {}

 protected:
  void submit(int lane, Task task) override { lanes_.push(lane, std::move(task)); }

 private:
  static constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();

  std::uint64_t draw(std::uint64_t n) { return random_() % n; }

  void rethrow() {
    if (!lanes_.failure()) return;
    reported_ = true;
    std::rethrow_exception(lanes_.failure());
  }

  // limits_[lane]: how many of a lane's tasks, counted from its beginning, may be run. Everything; or, for a
  // late wait, the target's record, what that waits for, and the operations that must start before.
  void set_limits(const CpuEvent* target) {
    const auto n = static_cast<std::size_t>(lanes_.size());
    limits_.assign(n, target == nullptr ? kAll : 0);
    if (target == nullptr) return;
    std::uint64_t tickets = 0;  // operations with smaller tickets must start
    raise(target->lane, target->position + 1);
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t lane = 0; lane < n; ++lane) {
        const Lanes::Lane& l = lanes_.at(static_cast<int>(lane));
        for (std::size_t i = 0; i < l.tasks.size(); ++i) {
          const Task& task = l.tasks[i];
          const std::uint64_t position = l.retired + i;
          const bool operation = task.kind == Task::Kind::operation;
          if (operation && task.ticket < tickets) changed |= raise(static_cast<int>(lane), position + 1);
          if (position >= limits_[lane]) continue;
          if (operation && task.ticket >= tickets) tickets = task.ticket + 1, changed = true;
          if (task.kind == Task::Kind::wait && !task.event->is_done())
            changed |= raise(task.event->lane, task.event->position + 1);
        }
      }
    }
  }

  bool raise(int lane, std::uint64_t limit) {
    std::uint64_t& l = limits_[static_cast<std::size_t>(lane)];
    if (limit <= l) return false;
    l = limit;
    return true;
  }

  // Streams have priorities that are drawn anew now and then: a stream may run far ahead of the others or
  // fall far behind. Operations in flight are polled whatever the limits, for the sake of their peers.
  template <class Done>
  void run_until(Done done) {
    PoliteWait polite;
    while (!done()) {
      if (draw(8) == 0 || priority_.size() != static_cast<std::size_t>(lanes_.size())) shuffle();
      const int lane = choose();
      if (lane >= 0) {
        if (lanes_.advance(lane) != Lanes::Outcome::pending) polite.reset();
        continue;
      }
      bool moved = false, waiting = false;
      for (int l = 0; l < lanes_.size(); ++l) {
        if (!lanes_.in_flight(l)) continue;
        waiting = true;
        moved |= lanes_.advance(l) != Lanes::Outcome::pending;
      }
      if (!waiting)
        throw InternalError(
            "deferred device: the host waits for work that nothing enqueued can complete -> record an event "
            "before anything waits for it");
      if (!moved) polite.pause();
    }
  }

  void shuffle() {
    priority_.resize(static_cast<std::size_t>(lanes_.size()));
    for (std::size_t i = 0; i < priority_.size(); ++i) priority_[i] = static_cast<int>(i);
    for (std::size_t i = priority_.size(); i > 1; --i) std::swap(priority_[i - 1], priority_[draw(i)]);
  }

  // The runnable lane of the highest priority (one in flight: by chance only, so that it may finish late);
  // -1 when there is none.
  int choose() {
    for (const int lane : priority_) {
      const auto l = static_cast<std::size_t>(lane);
      const bool allowed = l < limits_.size() && lanes_.at(lane).retired < limits_[l];
      if (lanes_.in_flight(lane) ? draw(4) == 0 : allowed && lanes_.runnable(lane)) return lane;
    }
    return -1;
  }

  Lanes lanes_;
  std::mt19937_64 random_;
  std::vector<std::uint64_t> limits_;
  std::vector<int> priority_;
  bool reported_ = false;  // some wait has rethrown the failure
};

}  // namespace

std::unique_ptr<Scheduler> make_deferred_scheduler(std::uint64_t seed) {
  return std::make_unique<DeferredScheduler>(seed);
}

}  // namespace strata::cpu
