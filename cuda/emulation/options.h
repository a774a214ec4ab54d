// What a test may choose about an emulated launch, and what it may read afterwards.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace strata::emulation {

// The order in which the emulation runs what the GPU may run in any order.
enum class Order { forward, reverse, random };

// When cp.async moves its bytes. Correct kernels cannot tell; `early` hides a missing wait, `late` an early
// overwrite.
enum class CopyTime { at_issue, at_wait };

// How threads of a block switch. `assembly` is x86-64 only and the default there; `ucontext` runs everywhere,
// slower.
enum class FiberKind { assembly, ucontext };

FiberKind default_fiber_kind();

struct Options {
  Order threads = Order::forward;
  Order blocks = Order::forward;
  std::uint64_t seed = 0;  // of the random orders
  CopyTime copies = CopyTime::at_issue;
  bool race_detector = true;   // acts only on kernels compiled in mode `race`
  bool poison = true;          // shared memory (each block) and new device memory start as NaN patterns
  bool check_pointers = true;  // a kernel argument must not point to host memory
  std::size_t shared_bytes_without_attribute = 48 * 1024;
  std::size_t shared_bytes_maximum = 163 * 1024;  // of a block, on sm_80; sm_90 has 227 KiB
  std::size_t reports_maximum = 8;                // races reported for one launch
  FiberKind fibers = default_fiber_kind();

  // The defaults, changed by what the environment sets; any other word throws std::invalid_argument:
  //   STRATA_EMULATION_THREADS, STRATA_EMULATION_BLOCKS = forward | reverse | random
  //   STRATA_EMULATION_SEED = N
  //   STRATA_EMULATION_COPIES = early | late
  //   STRATA_EMULATION_RACE = 0 | 1
  //   STRATA_EMULATION_FIBERS = assembly | ucontext
  // (STRATA_EMULATION_LAUNCH_LOG = FILE, read by launch_log.h, is no option of a launch.)
  static Options from_environment();
};

// The options of launches made by this host thread: those of the innermost ScopedOptions, else
// from_environment().
const Options& current_options();

class ScopedOptions {
 public:
  explicit ScopedOptions(const Options& options);
  ~ScopedOptions();
  ScopedOptions(const ScopedOptions&) = delete;
  ScopedOptions& operator=(const ScopedOptions&) = delete;

 private:
  Options saved_;
};

// Instructions issued, counted for warp instructions once per warp.
struct Counters {
  std::uint64_t launches = 0;
  std::uint64_t blocks = 0;
  std::uint64_t threads = 0;
  std::uint64_t mma_bf16 = 0;          // m16n8k16: 4096 FLOPs each
  std::uint64_t mma_tf32 = 0;          // m16n8k8: 2048 FLOPs each
  std::uint64_t ldmatrix = 0;          // of any size
  std::uint64_t ldmatrix_tiles = 0;    // 8x8 tiles loaded: 1, 2 or 4 for each
  std::uint64_t cp_async = 0;          // per thread
  std::uint64_t cp_async_bytes = 0;    // read from global memory
  std::uint64_t vector_accesses = 0;   // load_vec, store_vec and their streaming forms, per thread
  std::uint64_t barriers = 0;          // completed __syncthreads of a block
  std::uint64_t warp_collectives = 0;  // completed shuffles, votes, __syncwarp, ldmatrix and mma
  std::uint64_t atomics = 0;           // per thread

  Counters& operator+=(const Counters& other);
  bool operator==(const Counters&) const = default;
};

// Of this host thread: the last completed launch, and the sum since reset_counters().
const Counters& last_launch_counters();
const Counters& total_counters();
void reset_counters();

// Thrown by a launch (or a runtime call) that used the device wrongly. The launch's remaining threads did not
// run.
class Misuse : public std::runtime_error {
 public:
  explicit Misuse(std::vector<std::string> reports);
  // One entry for each finding; what() joins them.
  const std::vector<std::string>& reports() const { return reports_; }

 private:
  std::vector<std::string> reports_;
};

}  // namespace strata::emulation
