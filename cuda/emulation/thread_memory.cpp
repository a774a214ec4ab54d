// What a thread does to memory other than plain loads and stores: cp.async, atomics, fences, checked vector
// accesses.
#include "cuda/emulation/executor.h"

#include <cstring>

namespace strata::emulation {

namespace {

void move(const PendingCopy& copy) {
  std::memcpy(copy.shared, copy.global, static_cast<std::size_t>(copy.source_bytes));
  std::memset(copy.shared + copy.source_bytes, 0, static_cast<std::size_t>(copy.bytes - copy.source_bytes));
}

// Completes the oldest copies while `finished` says so of them.
template <typename Finished>
void complete_copies(Executor& executor, const Finished& finished) {
  Thread& thread = executor.thread(executor.current());
  while (!thread.copies.empty() && finished(thread.copies.front())) {
    const PendingCopy& copy = thread.copies.front();
    if (executor.options().copies == CopyTime::at_wait) move(copy);
    if (RaceDetector* race = executor.race()) {
      race->copy_done(executor.current(), copy.shared, static_cast<std::size_t>(copy.bytes),
                      race->site(copy.where));
    }
    thread.copies.pop_front();
  }
}

}  // namespace

void copy_async(void* shared, const void* global, int bytes, int source_bytes, Where where) {
  Executor& executor = in_kernel("cp_async");
  const auto size = static_cast<std::size_t>(bytes);
  check_alignment(shared, size, where);
  check_alignment(global, size, where);
  const auto refuse = [&](const std::string& what) {
    executor.fail("cp_async<" + std::to_string(bytes) + "> at " + format_where(where) + " by " +
                  executor.describe_thread(executor.current()) + ": " + what);
  };
  if (source_bytes < 0 || source_bytes > bytes) {
    refuse(std::to_string(source_bytes) + " source bytes -> 0 to " + std::to_string(bytes) + " are allowed");
  }
  if (executor.shared_holding(shared, size) == nullptr) {
    refuse("its destination, " + executor.describe_address(shared) + ", does not lie in one shared array");
  }
  const auto source_size = static_cast<std::size_t>(source_bytes);
  if (source_bytes > 0 && executor.options().check_pointers &&
      !DeviceMemory::instance().holds(global, source_size)) {
    refuse("its source, " + std::to_string(source_bytes) + " bytes at " + executor.describe_address(global) +
           ", does not lie in one device allocation");
  }
  executor.counters().cp_async += 1;
  executor.counters().cp_async_bytes += source_size;
  Thread& thread = executor.thread(executor.current());
  const PendingCopy copy{static_cast<char*>(shared),
                         static_cast<const char*>(global),
                         bytes,
                         source_bytes,
                         thread.groups_committed,
                         where};
  if (executor.options().copies == CopyTime::at_issue) move(copy);
  RaceDetector* race = executor.race();
  if (race != nullptr) {
    race->access(executor.current(), global, source_size, Access::read, race->site(where));
    race->access(executor.current(), shared, size, Access::copying, race->site(where));
  }
  if (race != nullptr || executor.options().copies == CopyTime::at_wait) thread.copies.push_back(copy);
}

void copy_async_commit() {
  Executor& executor = in_kernel("cp_async_commit");
  executor.thread(executor.current()).groups_committed += 1;
}

void copy_async_wait(int pending) {
  Executor& executor = in_kernel("cp_async_wait");
  const std::uint64_t committed = executor.thread(executor.current()).groups_committed;
  complete_copies(executor, [&](const PendingCopy& copy) {
    return copy.group + static_cast<std::uint64_t>(pending) < committed;
  });
}

void copy_async_wait_all() {
  complete_copies(in_kernel("cp_async_wait_all"), [](const PendingCopy&) { return true; });
}

void memory_fence() {
  Executor& executor = in_kernel("__threadfence");
  if (RaceDetector* race = executor.race()) race->fence(executor.current());
}

template <typename T>
T atomic_update(T* address, AtomicOp op, T operand, T compare, Where where) {
  Executor& executor = in_kernel("an atomic");
  check_alignment(address, sizeof(T), where);
  executor.counters().atomics += 1;
  if (RaceDetector* race = executor.race()) {
    race->access(executor.current(), address, sizeof(T), Access::atomic, race->site(where));
    race->atomic_order(executor.current(), address);
  }
  const T old = *address;
  switch (op) {
    case AtomicOp::add:
      *address = old + operand;
      break;
    case AtomicOp::maximum:
      *address = old < operand ? operand : old;
      break;
    case AtomicOp::minimum:
      *address = operand < old ? operand : old;
      break;
    case AtomicOp::exchange:
      *address = operand;
      break;
    case AtomicOp::increment:
      *address = old >= operand ? T{0} : old + T{1};
      break;
    case AtomicOp::compare_and_swap:
      if (old == compare) *address = operand;
      break;
  }
  return old;
}

template int atomic_update(int*, AtomicOp, int, int, Where);
template unsigned atomic_update(unsigned*, AtomicOp, unsigned, unsigned, Where);
template unsigned long long atomic_update(unsigned long long*, AtomicOp, unsigned long long,
                                          unsigned long long, Where);
template float atomic_update(float*, AtomicOp, float, float, Where);
template double atomic_update(double*, AtomicOp, double, double, Where);

void report_misaligned(const void* p, std::size_t alignment, Where where) {
  const std::string what = std::to_string(alignment) + "-byte access at " + format_where(where);
  Executor& executor = in_kernel(what.c_str());
  executor.fail("misaligned " + what + " by " + executor.describe_thread(executor.current()) + ": " +
                executor.describe_address(p) + " is " +
                std::to_string(reinterpret_cast<std::uintptr_t>(p) % alignment) +
                " bytes past a multiple of " + std::to_string(alignment));
}

void vector_access(const void* p, Where where) {
  check_alignment(p, 16, where);
  if (Executor* executor = Executor::running()) executor->counters().vector_accesses += 1;
}

}  // namespace strata::emulation
