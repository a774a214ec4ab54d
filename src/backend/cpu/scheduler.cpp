#include "backend/cpu/scheduler.h"

#include <thread>

namespace strata::cpu {

void Lanes::push(int lane, Task task) {
  if (lane >= size()) lanes_.resize(static_cast<std::size_t>(lane) + 1);
  lanes_[static_cast<std::size_t>(lane)].tasks.push_back(std::move(task));
  ++queued_;
}

void Lanes::retire(Lane& lane) {
  // The task is destroyed after it has left the queue: what it captured may take long to free.
  const Task done = std::move(lane.tasks.front());
  lane.tasks.pop_front();
  ++lane.retired;
  --queued_;
}

bool Lanes::in_flight(int lane) const {
  const Lane& l = at(lane);
  return !l.tasks.empty() && l.tasks.front().started;
}

bool Lanes::runnable(int lane) const {
  const Lane& l = at(lane);
  if (l.tasks.empty()) return false;
  const Task& task = l.tasks.front();
  switch (task.kind) {
    case Task::Kind::work:
    case Task::Kind::record:
      return true;
    case Task::Kind::wait:
      return task.event->is_done();
    case Task::Kind::operation:
      return task.started || task.ticket == next_ticket_;
  }
  return false;
}

Lanes::Outcome Lanes::advance(int lane) {
  if (!runnable(lane)) return Outcome::blocked;
  Lane& l = lanes_[static_cast<std::size_t>(lane)];
  Task& task = l.tasks.front();
  const bool starts = task.kind == Task::Kind::operation && !task.started;
  // Whatever happens to it, an operation takes its turn once, or later ones would never start.
  if (starts) ++next_ticket_;
  try {
    if (task.kind == Task::Kind::record) {
      task.event->complete();
    } else if (task.kind == Task::Kind::work && !failure_) {
      task.work->run();
    } else if (task.kind == Task::Kind::operation && !failure_) {
      if (starts) {
        task.operation->start();
        task.started = true;
      }
      const auto progress = task.operation->progress();
      if (progress != AsyncOperation::Progress::done)
        return starts || progress == AsyncOperation::Progress::some ? Outcome::moved : Outcome::pending;
    }
  } catch (...) {
    fail(std::current_exception());
  }
  retire(l);
  return Outcome::advanced;
}

void PoliteWait::pause() {
  if (yielding()) {
    ++turns_;
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(next_rest());
  }
}

std::chrono::microseconds PoliteWait::next_rest() {
  constexpr int kLong = kYields + kShortRests;
  if (turns_++ < kLong) return std::chrono::microseconds(50);
  if (turns_ == kLong + kPolls) turns_ = kLong;
  return std::chrono::microseconds(turns_ == kLong ? 200 : 0);
}

void Scheduler::enqueue(int lane, Task task) {
  if (task.kind == Task::Kind::operation) task.ticket = operations_++;
  if (static_cast<std::size_t>(lane) >= pushed_.size()) pushed_.resize(static_cast<std::size_t>(lane) + 1);
  ++pushed_[static_cast<std::size_t>(lane)];
  submit(lane, std::move(task));
}

CpuEventPtr Scheduler::record(int lane) {
  const std::uint64_t position =
      static_cast<std::size_t>(lane) < pushed_.size() ? pushed_[static_cast<std::size_t>(lane)] : 0;
  auto event = std::make_shared<CpuEvent>(this, lane, position);
  Task task;
  task.kind = Task::Kind::record;
  task.event = event;
  enqueue(lane, std::move(task));
  return event;
}

CpuEventPtr Scheduler::record_inline() {
  auto event = std::make_shared<CpuEvent>(this, -1, 0);
  event->complete();
  return event;
}

}  // namespace strata::cpu
