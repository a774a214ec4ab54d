#pragma once
// Workers: a fixed set of threads that share out the tasks of one operation.
//
// Tasks are cut by the caller from the shape alone, never from the number of threads, so results do not
// depend on it. Threads sleep on a condition variable between operations: spinning threads of several ranks
// on one machine starve each other (an OpenMP team that spins was seen to make small operations a hundred
// times slower). oneDNN is always called with one OpenMP thread.
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace strata::cpu {

class Workers {
 public:
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const { return static_cast<int>(pool_.size()) + 1; }

  // Calls task(index, worker) for each index in [0, count), worker in [0, threads()). Returns when all are
  // done; rethrows the first exception. When another thread is using the pool, runs everything as worker 0.
  template <class F>
  void run(std::int64_t count, F&& task) {
    if (pool_.empty() || count <= 1) {
      for (std::int64_t i = 0; i < count; ++i) task(i, 0);
      return;
    }
    dispatch({count, &task,
              [](void* f, std::int64_t i, int w) { (*static_cast<std::remove_reference_t<F>*>(f))(i, w); }});
  }

 private:
  struct Job {
    std::int64_t count = 0;
    void* context = nullptr;
    void (*call)(void*, std::int64_t, int) = nullptr;
  };
  void dispatch(const Job& job);
  void work_on(std::unique_lock<std::mutex>& lock, int worker);
  void thread_main(int worker);

  std::mutex in_use_;  // held by the thread whose operation the pool runs
  std::mutex mutex_;
  std::condition_variable start_, done_;
  Job job_;
  std::int64_t next_ = 0, unfinished_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> pool_;
};

}  // namespace strata::cpu
