#include "backend/cpu/ops_workers.h"

namespace strata::cpu {

Workers::Workers(int threads) {
  for (int worker = 1; worker < threads; ++worker)
    pool_.emplace_back([this, worker] { thread_main(worker); });
}

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : pool_) thread.join();
}

void Workers::dispatch(const Job& job) {
  const std::unique_lock owner(in_use_, std::try_to_lock);
  if (!owner.owns_lock()) {
    for (std::int64_t i = 0; i < job.count; ++i) job.call(job.context, i, 0);
    return;
  }
  std::unique_lock lock(mutex_);
  job_ = job;
  next_ = 0;
  unfinished_ = job.count;
  error_ = nullptr;
  start_.notify_all();
  work_on(lock, 0);
  done_.wait(lock, [this] { return unfinished_ == 0; });
  const std::exception_ptr error = std::exchange(error_, nullptr);
  lock.unlock();
  if (error) std::rethrow_exception(error);
}

void Workers::work_on(std::unique_lock<std::mutex>& lock, int worker) {
  while (next_ < job_.count) {
    const Job job = job_;
    const std::int64_t task = next_++;
    lock.unlock();
    std::exception_ptr error;
    try {
      job.call(job.context, task, worker);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    if (--unfinished_ == 0) done_.notify_one();
  }
}

void Workers::thread_main(int worker) {
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [this] { return stop_ || next_ < job_.count; });
    if (stop_) return;
    work_on(lock, worker);
  }
}

}  // namespace strata::cpu
