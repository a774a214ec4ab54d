#pragma once
// The CPU's Device: memory with accounts, and streams in one of two modes.
//
// eager     Compute streams run their work inline, in the thread that enqueues it. Transfer streams run on
//           one communication thread, created with the first transfer stream; it sleeps when idle and polls
//           politely (yield, then short sleeps) while asynchronous operations are in flight. A compute stream
//           that waits for an event blocks the host until the event is done.
// deferred  Every stream only records. Work runs when the host waits, on the host's thread, in an order drawn
//           from `seed` among those that streams and events allow; so a missing event shows as a wrong number
//           for some seed. About half of the waits run nothing but what they need, the others mix in
//           anything. `completed` advances nothing. Fresh memory is filled with NaN patterns.
//
// In both modes asynchronous operations (collectives) start in the order in which they were enqueued, over
// all streams. That keeps ranks free of deadlock. Let all ranks enqueue collectives in orders that agree with
// one total order (they run the same program), and let c be the first collective of that order that never
// completes. Every member of c blocks only in waits that need c or something later: what comes earlier
// completes. A wait that needs c or a later collective starts c first, once c's stream and awaited events let
// it; those depend only on work enqueued before c, which uses only earlier collectives, all of which
// complete. So every member starts c, and every waiting rank polls all that it has in flight: c completes
// after all. (In deferred mode a rank must go on waiting for something that lies past c, or synchronise
// everything at its end; a program that runs the same waits on all ranks does.)
//
// Errors thrown by work on other threads, or by recorded work, fail the device: work not yet run is dropped,
// events still complete, and every later wait of the host rethrows the first error.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "backend/device.h"

namespace strata {

// Work that goes on by itself once started, such as a collective. Both calls come from the thread that runs
// the stream (communication thread, or the host in deferred mode) and never block.
class AsyncOperation {
 public:
  virtual ~AsyncOperation() = default;
  virtual void start() = 0;
  enum class Progress : std::uint8_t { none, some, done };
  virtual Progress progress() = 0;  // polled after start until done; the poller rests after a while of none
};

namespace cpu {
class Work {
 public:
  virtual ~Work() = default;
  virtual void run() = 0;
};
class Scheduler;
}  // namespace cpu

class CpuStream final : public Stream {
 public:
  // Enqueues work(). On a compute stream in eager mode that is a plain call: nothing is allocated, and what
  // it throws reaches the caller.
  template <class F>
  void run(F&& work) {
    if (inline_) {
      work();
      return;
    }
    struct Recorded final : cpu::Work {
      explicit Recorded(F&& f) : call(std::forward<F>(f)) {}
      void run() override { call(); }
      std::decay_t<F> call;
    };
    enqueue(std::make_unique<Recorded>(std::forward<F>(work)));
  }
  // Enqueues an asynchronous operation; transfer streams only.
  void run_async(std::unique_ptr<AsyncOperation> operation);

  bool transfer() const { return transfer_; }

  CpuStream(std::string name, cpu::Scheduler& scheduler, int lane, bool runs_inline, bool transfer)
      : Stream(std::move(name)),
        scheduler_(scheduler),
        lane_(lane),
        inline_(runs_inline),
        transfer_(transfer) {}
  cpu::Scheduler& scheduler() const { return scheduler_; }
  int lane() const { return lane_; }
  bool runs_inline() const { return inline_; }

 private:
  void enqueue(std::unique_ptr<cpu::Work> work);

  cpu::Scheduler& scheduler_;
  int lane_;
  bool inline_, transfer_;
};

// The CPU stream behind a Stream; throws InternalError when it belongs to another backend.
CpuStream& cpu_stream(Stream& stream);

struct CpuDeviceOptions {
  enum Order : std::uint8_t { eager, deferred } order = eager;
  std::uint64_t seed = 0;  // deferred: which of the legal orders
  bool poison = false;     // fill fresh memory with NaN patterns; deferred mode always does
};

// Releasing memory while recorded work is pending fails the device (deferred mode): the next wait throws
// InternalError. Memory of Purpose::workspace is exempt and kept until that work has run, because operations
// may outgrow their scratch.
class CpuDevice : public Device {
 public:
  virtual const CpuDeviceOptions& options() const = 0;
  // Calls `hook` on the communication thread about every `seconds` while it has nothing to do, so that a
  // transport can deliver what it has buffered. Eager mode only: deferred mode has no such thread.
  virtual void set_idle_hook(std::function<void()> hook, double seconds) = 0;
};

std::unique_ptr<CpuDevice> make_cpu_device(const CpuDeviceOptions& options = {});

}  // namespace strata
