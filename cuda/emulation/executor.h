// Runs the blocks of a launch one after another, and the threads of a block as fibers in a chosen order.
#pragma once

#include "cuda/emulation/fiber.h"
#include "cuda/emulation/launch.h"
#include "cuda/emulation/memory.h"
#include "cuda/emulation/options.h"
#include "cuda/emulation/race.h"

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace strata::emulation {

inline constexpr unsigned lanes_per_warp = 32;
inline constexpr unsigned threads_maximum = 1024;
inline constexpr unsigned warps_maximum = threads_maximum / lanes_per_warp;

// A cp.async that has been issued; `group` counts the issuing thread's commits before it.
struct PendingCopy {
  char* shared;
  const char* global;
  int bytes;
  int source_bytes;
  std::uint64_t group;
  Where where;
};

enum class ThreadState { ready, at_barrier, at_collective, finished };

struct Thread {
  uint3 index{};
  ThreadState state = ThreadState::ready;
  const char* waits_for = "";  // the name of the barrier or collective, for reports
  Where waits_at;
  unsigned mask = 0;
  std::deque<PendingCopy> copies;
  std::uint64_t groups_committed = 0;
};

// One warp instruction in which lanes take part together. `execute` runs once, when all have arrived, with
// the operands that the lanes of `lanes` brought; a lane's results go into its operand.
struct CollectiveKind {
  const char* name;
  bool aligned;  // needs all 32 lanes (the .aligned instructions of PTX)
  bool is_sync;  // __syncwarp: orders memory, and lanes may meet from different lines
  void (*execute)(class Executor& executor, unsigned warp, unsigned lanes,
                  void* const (&operands)[lanes_per_warp], Where where);
};

class Executor {
 public:
  // The one of this host thread.
  static Executor& instance();
  // The one running a kernel on this host thread now, or nullptr.
  static Executor* running();

  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void run(const Launch& launch);

  // ---- for the thread that runs now ----
  int barrier(BarrierKind kind, int predicate, Where where);
  // Differing variants (shuffle width, number of tiles, ...) of one kind are different instructions.
  void collective(const CollectiveKind& kind, unsigned variant, unsigned mask, void* operand, Where where);
  void* static_shared(const void* key, std::size_t bytes, const char* name, Where where);
  void* dynamic_shared(Where where);
  unsigned current() const { return current_; }
  Thread& thread(unsigned i) { return threads_[i]; }

  // Ends the launch with a report. Called by a running thread; never returns.
  [[noreturn]] void fail(const std::string& report);
  // The same for code that must return first: the launch ends when it does.
  void stop(const std::string& report);
  // Leaves the thread for good after stop(), where no exception may pass (code that does not expect one).
  [[noreturn]] void halt();

  // Where p lies in the block's shared memory: the buffer that holds [p, p + bytes), or nullptr.
  struct SharedBuffer {
    const void* key;
    std::string name;
    char* begin;
    std::size_t bytes;
  };
  const SharedBuffer* shared_holding(const void* p, std::size_t bytes) const;
  std::string describe_address(
      const void* p) const;  // "tile+128 of shared memory", "device memory 0x... +12"

  std::string describe_thread(unsigned i) const;  // "thread (1,0,0) of block (0,0,0)"

  const Options& options() const { return options_; }
  RaceDetector* race() const { return race_.get(); }  // nullptr when off
  Counters& counters() { return counters_; }

  const Counters& last_launch() const { return last_launch_; }
  const Counters& total() const { return total_; }
  void reset_total() { total_ = {}; }

 private:
  Executor() = default;

  void run_block(std::uint64_t block);
  void poison_shared();
  void release_shared();
  int next_ready();
  void set_ready(unsigned i);
  void wait(ThreadState state, const char* what, Where where, unsigned mask);
  void complete_barrier();
  void thread_finished(unsigned i);
  void complete_collective(unsigned warp, std::size_t slot);
  void note_race(const RaceDetector::Finding& finding);
  std::string describe_deadlock() const;
  std::string describe_launch() const;

  struct Barrier {
    unsigned arrived = 0;
    BarrierKind kind = BarrierKind::plain;
    Where where;
    unsigned first = 0;  // the thread that came first
    int count = 0;       // of true predicates
    int result = 0;
  };
  struct Collective {
    const CollectiveKind* kind = nullptr;
    unsigned variant = 0;
    unsigned mask = 0;
    unsigned arrived = 0;
    unsigned first = 0;
    Where where;
    void* operands[lanes_per_warp] = {};
  };

  Options options_;
  const Launch* launch_ = nullptr;
  std::unique_ptr<FiberSet> fibers_;
  FiberKind fibers_kind_{};
  std::unique_ptr<RaceDetector> race_;
  std::array<Thread, threads_maximum> threads_;
  std::array<std::uint64_t, threads_maximum / 64> ready_{};
  std::array<unsigned, warps_maximum> live_lanes_{};
  std::array<std::vector<Collective>, warps_maximum> collectives_;
  Barrier barrier_;
  unsigned thread_count_ = 0;
  unsigned live_ = 0;
  unsigned current_ = 0;
  std::uint64_t block_ = 0;
  std::uint64_t random_ = 0;
  std::vector<SharedBuffer> shared_;
  std::size_t shared_bytes_ = 0;
  std::string failure_;                // why the launch stopped
  std::vector<std::string> findings_;  // of the race detector
  Counters counters_;
  Counters last_launch_;
  Counters total_;
};

// The running executor, or a thrown Misuse that says that `what` was called outside a kernel.
Executor& in_kernel(const char* what);

std::string format_where(Where where);
std::string describe_mask(unsigned mask);  // "0x0000ffff"

// SplitMix64: the next number of the sequence that `state` holds.
std::uint64_t next_random(std::uint64_t& state);

}  // namespace strata::emulation
