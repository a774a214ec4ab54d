#include "cuda/emulation/executor.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <numeric>

constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};

namespace strata::emulation {

namespace {

constinit thread_local Executor* running_executor = nullptr;

// Unwinds the thread that ends a launch, so that what it has on its stack is destroyed. Threads that wait are
// abandoned: kernels keep nothing that needs destroying across a barrier.
struct ThreadStopped {};

// Marks this host thread as inside a kernel.
class Running {
 public:
  explicit Running(Executor* executor) { running_executor = executor; }
  ~Running() { running_executor = nullptr; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

const char* name_of(BarrierKind kind) {
  switch (kind) {
    case BarrierKind::plain:
      return "__syncthreads()";
    case BarrierKind::count:
      return "__syncthreads_count()";
    case BarrierKind::all:
      return "__syncthreads_and()";
    case BarrierKind::any:
      return "__syncthreads_or()";
  }
  return "";
}

uint3 coordinates(std::uint64_t linear, dim3 extent) {
  return {static_cast<unsigned>(linear % extent.x), static_cast<unsigned>(linear / extent.x % extent.y),
          static_cast<unsigned>(linear / extent.x / extent.y)};
}

}  // namespace

std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

Executor& Executor::instance() {
  static thread_local Executor executor;
  return executor;
}

Executor* Executor::running() {
  return running_executor;
}

Executor::~Executor() {
  release_shared();
}

Executor& in_kernel(const char* what) {
  if (Executor* executor = running_executor) return *executor;
  throw Misuse({std::string(what) + " was called outside a kernel -> launch with GPU_LAUNCH"});
}

// ---- a launch ----

void Executor::run(const Launch& launch) {
  if (running_executor != nullptr)
    fail("a kernel launched a kernel: the emulation has no dynamic parallelism");
  options_ = current_options();
  if (fibers_ == nullptr || fibers_kind_ != options_.fibers) {
    fibers_kind_ = options_.fibers;
    fibers_ = std::make_unique<FiberSet>(options_.fibers, [this](std::size_t) {
      try {
        launch_->thread();
      } catch (const ThreadStopped&) {
      } catch (const std::exception& error) {
        failure_ = describe_thread(current_) + " threw: " + error.what();
      }
    });
  }
  launch_ = &launch;
  thread_count_ = launch.block.x * launch.block.y * launch.block.z;
  fibers_->reserve(thread_count_);
  for (unsigned i = 0; i < thread_count_; ++i) threads_[i].index = coordinates(i, launch.block);
  if (Arena* a = arena(); a != nullptr && options_.race_detector) {
    if (race_ == nullptr) {
      race_ = std::make_unique<RaceDetector>(*a);
      race_->on_finding([this](const RaceDetector::Finding& finding) { note_race(finding); });
    }
    race_->begin_launch(thread_count_, options_.reports_maximum);
  } else {
    race_.reset();
  }
  counters_ = {};
  counters_.launches = 1;
  failure_.clear();
  findings_.clear();
  random_ = options_.seed;
  release_shared();
  blockDim = launch.block;
  gridDim = launch.grid;
  if (launch.dynamic_shared_bytes > 0) {
    auto* p = static_cast<char*>(allocate_exact(launch.dynamic_shared_bytes, true));
    shared_.push_back({nullptr, "dynamic shared memory", p, launch.dynamic_shared_bytes});
    shared_bytes_ = launch.dynamic_shared_bytes;
  }

  const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  std::vector<std::uint64_t> shuffled;
  if (options_.blocks == Order::random) {
    shuffled.resize(blocks);
    std::iota(shuffled.begin(), shuffled.end(), std::uint64_t{0});
    for (std::uint64_t i = blocks; i > 1; --i) std::swap(shuffled[i - 1], shuffled[next_random(random_) % i]);
  }
  {
    const Running scope(this);
    for (std::uint64_t i = 0; i < blocks && failure_.empty(); ++i) {
      run_block(options_.blocks == Order::forward   ? i
                : options_.blocks == Order::reverse ? blocks - 1 - i
                                                    : shuffled[i]);
    }
  }
  last_launch_ = counters_;
  total_ += counters_;
  if (failure_.empty() && findings_.empty()) return;

  std::vector<std::string> reports = std::move(findings_);
  if (!failure_.empty()) {
    fibers_->reset();
    reports.push_back(failure_);
  }
  reports.back() += "\n  " + describe_launch();
  throw Misuse(std::move(reports));
}

void Executor::run_block(std::uint64_t block) {
  block_ = block;
  blockIdx = coordinates(block, launch_->grid);
  counters_.blocks += 1;
  counters_.threads += thread_count_;
  poison_shared();
  barrier_ = {};
  live_ = thread_count_;
  live_lanes_.fill(0);
  for (unsigned i = 0; i < thread_count_; ++i) {
    Thread& thread = threads_[i];
    thread.copies.clear();
    thread.groups_committed = 0;
    live_lanes_[i / lanes_per_warp] |= 1u << i % lanes_per_warp;
    set_ready(i);
  }
  for (auto& pending : collectives_) pending.clear();
  if (race_) race_->begin_block(static_cast<std::uint32_t>(block));

  while (live_ > 0) {
    const int next = next_ready();
    if (next < 0) {
      failure_ = describe_deadlock();
    } else {
      current_ = static_cast<unsigned>(next);
      ready_[current_ / 64] &= ~(std::uint64_t{1} << current_ % 64);
      threadIdx = threads_[current_].index;
      if (fibers_->resume(current_) && failure_.empty()) thread_finished(current_);
    }
    if (!failure_.empty()) {
      ready_.fill(0);
      return;
    }
  }
}

void Executor::set_ready(unsigned i) {
  threads_[i].state = ThreadState::ready;
  ready_[i / 64] |= std::uint64_t{1} << i % 64;
}

// forward: the lowest ready thread, so that a warp runs as far ahead of the later ones as barriers let it;
// reverse: the highest; random: any.
int Executor::next_ready() {
  const int words = static_cast<int>((thread_count_ + 63) / 64);
  if (options_.threads == Order::forward) {
    for (int w = 0; w < words; ++w) {
      if (ready_[w] != 0) return w * 64 + std::countr_zero(ready_[w]);
    }
    return -1;
  }
  if (options_.threads == Order::reverse) {
    for (int w = words - 1; w >= 0; --w) {
      if (ready_[w] != 0) return w * 64 + 63 - std::countl_zero(ready_[w]);
    }
    return -1;
  }
  int count = 0;
  for (int w = 0; w < words; ++w) count += std::popcount(ready_[w]);
  if (count == 0) return -1;
  auto skip = static_cast<int>(next_random(random_) % static_cast<unsigned>(count));
  for (int w = 0;; ++w) {
    const int here = std::popcount(ready_[w]);
    if (skip >= here) {
      skip -= here;
      continue;
    }
    std::uint64_t word = ready_[w];
    while (skip-- > 0) word &= word - 1;
    return w * 64 + std::countr_zero(word);
  }
}

void Executor::wait(ThreadState state, const char* what, Where where, unsigned mask) {
  const unsigned self = current_;
  Thread& thread = threads_[self];
  thread.state = state;
  thread.waits_for = what;
  thread.waits_at = where;
  thread.mask = mask;
  fibers_->yield();
}

void Executor::thread_finished(unsigned i) {
  threads_[i].state = ThreadState::finished;
  live_ -= 1;
  const unsigned warp = i / lanes_per_warp;
  live_lanes_[warp] &= ~(1u << i % lanes_per_warp);
  // Barriers and collectives wait for threads that have not exited; this exit may have been all they lacked.
  if (barrier_.arrived > 0 && barrier_.arrived == live_) complete_barrier();
  auto& pending = collectives_[warp];
  for (std::size_t slot = pending.size(); slot-- > 0;) {
    const Collective& waiting = pending[slot];
    if (waiting.kind->aligned) {
      failure_ = std::string(waiting.kind->name) + " needs all 32 lanes of a warp: " + describe_thread(i) +
                 " exited while " + describe_thread(waiting.first) + " waited at " +
                 format_where(waiting.where);
      return;
    }
    if (waiting.arrived == (waiting.mask & live_lanes_[warp])) complete_collective(warp, slot);
  }
}

void Executor::stop(const std::string& report) {
  if (failure_.empty()) failure_ = report;
}

void Executor::fail(const std::string& report) {
  stop(report);
  throw ThreadStopped();
}

void Executor::halt() {
  fibers_->yield();
  std::abort();  // a stopped launch resumes no thread
}

// ---- __syncthreads ----

int Executor::barrier(BarrierKind kind, int predicate, Where where) {
  if (barrier_.arrived == 0) {
    barrier_.kind = kind;
    barrier_.where = where;
    barrier_.first = current_;
    barrier_.count = 0;
  } else if (barrier_.kind != kind || barrier_.where.line != where.line ||
             std::strcmp(barrier_.where.file, where.file) != 0) {
    fail("divergent barrier: " + describe_thread(barrier_.first) + " waits in " + name_of(barrier_.kind) +
         " at " + format_where(barrier_.where) + ", " + describe_thread(current_) + " arrived in " +
         name_of(kind) + " at " + format_where(where) +
         " -> every thread of a block must reach the same barrier");
  }
  barrier_.arrived += 1;
  barrier_.count += predicate != 0;
  if (barrier_.arrived == live_) {
    complete_barrier();
  } else {
    wait(ThreadState::at_barrier, name_of(kind), where, 0);
  }
  return barrier_.result;
}

void Executor::complete_barrier() {
  counters_.barriers += 1;
  switch (barrier_.kind) {
    case BarrierKind::plain:
      break;
    case BarrierKind::count:
      barrier_.result = barrier_.count;
      break;
    case BarrierKind::all:
      barrier_.result = barrier_.count == static_cast<int>(barrier_.arrived);
      break;
    case BarrierKind::any:
      barrier_.result = barrier_.count > 0;
      break;
  }
  barrier_.arrived = 0;
  for (unsigned i = 0; i < thread_count_; ++i) {
    if (threads_[i].state == ThreadState::at_barrier) set_ready(i);
  }
  if (race_) race_->barrier();
}

// ---- warp collectives ----

void Executor::collective(const CollectiveKind& kind, unsigned variant, unsigned mask, void* operand,
                          Where where) {
  const unsigned warp = current_ / lanes_per_warp;
  const unsigned lane = current_ % lanes_per_warp;
  const unsigned self = 1u << lane;
  if ((mask & self) == 0) {
    fail(std::string(kind.name) + " at " + format_where(where) + ": " + describe_thread(current_) +
         " (lane " + std::to_string(lane) + ") is not in the mask " + describe_mask(mask) +
         " that it passes");
  }
  if (kind.aligned && live_lanes_[warp] != ~0u) {
    fail(std::string(kind.name) + " at " + format_where(where) +
         " needs all 32 lanes of a warp: of the warp of " + describe_thread(current_) + " only the lanes " +
         describe_mask(live_lanes_[warp]) + " exist or have not exited");
  }
  auto& pending = collectives_[warp];
  std::size_t slot = 0;
  while (slot < pending.size() && pending[slot].mask != mask) ++slot;
  if (slot == pending.size()) {
    pending.emplace_back();
    pending[slot].kind = &kind;
    pending[slot].variant = variant;
    pending[slot].mask = mask;
    pending[slot].first = current_;
    pending[slot].where = where;
  }
  Collective& meeting = pending[slot];
  const bool same_line = meeting.where.line == where.line && std::strcmp(meeting.where.file, where.file) == 0;
  if (meeting.kind != &kind || meeting.variant != variant || (!same_line && !kind.is_sync)) {
    fail("divergent warp collective: " + describe_thread(meeting.first) + " waits in " + meeting.kind->name +
         " at " + format_where(meeting.where) + ", " + describe_thread(current_) + " arrived in " +
         kind.name + " at " + format_where(where) + ", both with the mask " + describe_mask(mask) +
         " -> all lanes of the mask must execute the same instruction with the same parameters");
  }
  meeting.arrived |= self;
  meeting.operands[lane] = operand;
  if (meeting.arrived == (mask & live_lanes_[warp])) {
    complete_collective(warp, slot);
    ready_[current_ / 64] &= ~(std::uint64_t{1} << current_ % 64);  // this thread runs on
    if (!failure_.empty()) throw ThreadStopped();
  } else {
    wait(ThreadState::at_collective, kind.name, where, mask);
  }
}

void Executor::complete_collective(unsigned warp, std::size_t slot) {
  const Collective done = collectives_[warp][slot];
  collectives_[warp].erase(collectives_[warp].begin() + static_cast<std::ptrdiff_t>(slot));
  counters_.warp_collectives += 1;
  if (done.kind->execute != nullptr) done.kind->execute(*this, warp, done.arrived, done.operands, done.where);
  if (done.kind->is_sync && race_) race_->warp_sync(warp, done.arrived);
  for (unsigned lanes = done.arrived; lanes != 0; lanes &= lanes - 1) {
    set_ready(warp * lanes_per_warp + static_cast<unsigned>(std::countr_zero(lanes)));
  }
}

int block_barrier(BarrierKind kind, int predicate, Where where) {
  return in_kernel("__syncthreads").barrier(kind, predicate, where);
}

}  // namespace strata::emulation
