// What a host thread sets and reads around launches: options, counters, and the checks that CUDA makes of a
// launch.
#include "cuda/emulation/launch.h"

#include "cuda/emulation/executor.h"
#include "cuda/emulation/launch_log.h"
#include "cuda/emulation/runtime.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace strata::emulation {

namespace {

struct HostThread {
  Options options = Options::from_environment();
  StreamQueue queue;
};

HostThread& host_thread() {
  static thread_local HostThread state;
  return state;
}

struct Word {
  const char* text;
  int value;
};

// Sets `target` from an environment variable that holds one of the words.
template <typename T, std::size_t N>
void read_word(const char* variable, const Word (&words)[N], T& target) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == 0) return;
  std::string allowed;
  for (const Word& word : words) {
    if (std::strcmp(value, word.text) == 0) {
      target = static_cast<T>(word.value);
      return;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(word.text);
  }
  throw std::invalid_argument(std::string(variable) + "=" + value + " -> one of: " + allowed);
}

}  // namespace

Options Options::from_environment() {
  constexpr Word orders[] = {{"forward", static_cast<int>(Order::forward)},
                             {"reverse", static_cast<int>(Order::reverse)},
                             {"random", static_cast<int>(Order::random)}};
  constexpr Word copies[] = {{"early", static_cast<int>(CopyTime::at_issue)},
                             {"late", static_cast<int>(CopyTime::at_wait)}};
  constexpr Word switches[] = {{"0", 0}, {"1", 1}};
  constexpr Word fibers[] = {{"assembly", static_cast<int>(FiberKind::assembly)},
                             {"ucontext", static_cast<int>(FiberKind::ucontext)}};
  Options options;
  read_word("STRATA_EMULATION_THREADS", orders, options.threads);
  read_word("STRATA_EMULATION_BLOCKS", orders, options.blocks);
  read_word("STRATA_EMULATION_COPIES", copies, options.copies);
  read_word("STRATA_EMULATION_RACE", switches, options.race_detector);
  read_word("STRATA_EMULATION_FIBERS", fibers, options.fibers);
  if (const char* seed = std::getenv("STRATA_EMULATION_SEED"); seed != nullptr && *seed != 0) {
    const std::string_view text = seed;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), options.seed);
    if (error != std::errc{} || end != text.data() + text.size()) {
      throw std::invalid_argument("STRATA_EMULATION_SEED=" + std::string(text) + " -> a whole number");
    }
  }
  return options;
}

const Options& current_options() {
  return host_thread().options;
}

ScopedOptions::ScopedOptions(const Options& options) : saved_(host_thread().options) {
  host_thread().options = options;
}

ScopedOptions::~ScopedOptions() {
  host_thread().options = saved_;
}

Counters& Counters::operator+=(const Counters& other) {
  launches += other.launches;
  blocks += other.blocks;
  threads += other.threads;
  mma_bf16 += other.mma_bf16;
  mma_tf32 += other.mma_tf32;
  ldmatrix += other.ldmatrix;
  ldmatrix_tiles += other.ldmatrix_tiles;
  cp_async += other.cp_async;
  cp_async_bytes += other.cp_async_bytes;
  vector_accesses += other.vector_accesses;
  barriers += other.barriers;
  warp_collectives += other.warp_collectives;
  atomics += other.atomics;
  return *this;
}

const Counters& last_launch_counters() {
  return Executor::instance().last_launch();
}
const Counters& total_counters() {
  return Executor::instance().total();
}
void reset_counters() {
  Executor::instance().reset_total();
}

Misuse::Misuse(std::vector<std::string> reports)
    : std::runtime_error([&] {
        std::string text;
        for (const std::string& report : reports) text += (text.empty() ? "" : "\n") + report;
        return text;
      }()),
      reports_(std::move(reports)) {}

void set_stream_queue(StreamQueue queue) {
  host_thread().queue = std::move(queue);
}

void run(const Launch& launch) {
  Executor::instance().run(launch);
}

void submit(Launch launch) {
  const auto refuse = [&](const std::string& what) {
    throw Misuse(
        {"launch of " + std::string(launch.name) + " at " + format_where(launch.where) + ": " + what});
  };
  const dim3 g = launch.grid;
  const dim3 b = launch.block;
  const auto extent = [](dim3 d) {
    return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
  };
  if (g.x == 0 || g.y == 0 || g.z == 0) {
    refuse("an empty grid " + extent(g) + " -> return before the launch when there is nothing to do");
  }
  if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
    refuse("grid " + extent(g) + " -> at most 2147483647 x 65535 x 65535 blocks");
  }
  if (b.x == 0 || b.y == 0 || b.z == 0) refuse("an empty block " + extent(b));
  if (std::uint64_t{b.x} * b.y * b.z > threads_maximum || b.z > 64) {
    refuse("block " + extent(b) + " -> at most 1024 threads, 64 of them in z");
  }
  const Options& options = current_options();
  if (launch.dynamic_shared_bytes > options.shared_bytes_maximum) {
    refuse(std::to_string(launch.dynamic_shared_bytes) + " bytes of dynamic shared memory -> at most " +
           std::to_string(options.shared_bytes_maximum));
  }
  const std::size_t allowed = allowed_dynamic_shared(launch.kernel, options.shared_bytes_without_attribute);
  if (launch.dynamic_shared_bytes > allowed) {
    refuse(std::to_string(launch.dynamic_shared_bytes) + " bytes of dynamic shared memory, but " +
           std::to_string(allowed) + " are allowed -> call gpu::allow_shared_bytes(kernel, bytes) before");
  }
  if (options.check_pointers) {
    for (const void* p : launch.pointers) {
      if (p != nullptr && !DeviceMemory::instance().find(p)) {
        refuse("one of the pointers passed, " + Executor::instance().describe_address(p) +
               " -> kernels take memory from cudaMalloc");
      }
    }
  }
  LaunchLog::note(launch);
  if (const StreamQueue& queue = host_thread().queue) {
    const cudaStream_t stream = launch.stream;
    queue(stream, [kept = std::move(launch)] { run(kept); });
  } else {
    run(launch);
  }
}

}  // namespace strata::emulation
