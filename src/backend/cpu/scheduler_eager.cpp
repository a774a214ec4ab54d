// Eager mode: compute runs inline, transfer streams on one communication thread.
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "backend/cpu/scheduler.h"

namespace strata::cpu {
namespace {

class EagerScheduler final : public Scheduler {
 public:
  ~EagerScheduler() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  bool runs_inline(bool transfer) const override { return !transfer; }

  void wait(int lane, bool lane_is_inline, const CpuEventPtr& event) override {
    if (lane_is_inline) return synchronize(event);
    if (event->is_done()) return;
    Task task;
    task.kind = Task::Kind::wait;
    task.event = event;
    enqueue(lane, std::move(task));
  }

  void synchronize(const CpuEventPtr& event) override {
    event->done.wait(false, std::memory_order_acquire);
    rethrow();
  }

  void synchronize() override {
    for (std::uint64_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;)
      unfinished_.wait(left);
    rethrow();
  }

  bool idle() const override { return unfinished_.load(std::memory_order_acquire) == 0; }

  void fail(std::exception_ptr error) override {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(error);
    failed_.store(true, std::memory_order_release);
  }

  void set_idle_hook(std::function<void()> hook, double seconds) override {
    const std::lock_guard lock(mutex_);
    hook_ = std::move(hook);
    hook_interval_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

 protected:
  void submit(int lane, Task task) override {
    unfinished_.fetch_add(1, std::memory_order_relaxed);
    {
      const std::lock_guard lock(mutex_);
      inbox_.emplace_back(lane, std::move(task));
      if (!thread_.joinable()) thread_ = std::thread([this] { communicate(); });
    }
    wake_.notify_one();
  }

 private:
  void rethrow() {
    if (!failed_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(failure_);
  }

  // The communication thread. Lanes are its own; the host hands tasks over through the inbox.
  void communicate() {
    Lanes lanes;
    PoliteWait polite;
    std::vector<std::pair<int, Task>> received;
    while (receive(lanes, polite, received)) {
      for (auto& [lane, task] : received) lanes.push(lane, std::move(task));
      if (!received.empty()) polite.reset();
      received.clear();
      if (sweep(lanes)) polite.reset();
    }
  }

  // Takes what the host has enqueued; sleeps while there is nothing to do. False: the device is going away.
  bool receive(const Lanes& lanes, PoliteWait& polite, std::vector<std::pair<int, Task>>& received) {
    std::unique_lock lock(mutex_);
    const auto news = [this] { return stop_ || !inbox_.empty(); };
    if (lanes.empty()) {
      while (!news()) {
        if (!hook_) {
          wake_.wait(lock);
        } else if (!wake_.wait_for(lock, hook_interval_, news)) {
          const auto hook = hook_;
          lock.unlock();
          try {
            hook();
          } catch (...) {
            fail(std::current_exception());
          }
          lock.lock();
        }
      }
    } else if (!news()) {
      if (polite.yielding()) {
        lock.unlock();
        polite.pause();
        lock.lock();
      } else {
        const auto rest = polite.next_rest();
        if (rest.count() > 0) wake_.wait_for(lock, rest, news);
      }
    }
    received.swap(inbox_);
    return !stop_;
  }

  // Advances every lane as far as it goes. True when anything moved.
  bool sweep(Lanes& lanes) {
    bool moved_once = false;
    for (bool moved = true; moved;) {
      moved = false;
      for (int lane = 0; lane < lanes.size(); ++lane) {
        for (;;) {
          const std::uint64_t before = lanes.at(lane).retired;
          const auto outcome = lanes.advance(lane);
          if (lanes.failure()) fail(lanes.failure());
          const std::uint64_t finished = lanes.at(lane).retired - before;
          if (finished != 0 && unfinished_.fetch_sub(finished, std::memory_order_acq_rel) == finished)
            unfinished_.notify_all();
          if (outcome == Lanes::Outcome::blocked || outcome == Lanes::Outcome::pending) break;
          moved = moved_once = true;
          if (outcome == Lanes::Outcome::moved) break;
        }
      }
    }
    return moved_once;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::pair<int, Task>> inbox_;
  std::thread thread_;
  std::function<void()> hook_;
  Clock::duration hook_interval_{};
  std::exception_ptr failure_;
  bool stop_ = false;
  std::atomic<bool> failed_{false};
  std::atomic<std::uint64_t> unfinished_{0};
};

}  // namespace

std::unique_ptr<Scheduler> make_eager_scheduler() {
  return std::make_unique<EagerScheduler>();
}

}  // namespace strata::cpu
