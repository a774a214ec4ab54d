#include "backend/cpu/device.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "backend/cpu/scheduler.h"
#include "base/error.h"
#include "base/log.h"

namespace strata {
namespace {

constexpr std::size_t kAlignment = 64, kHugePage = std::size_t{2} << 20;

// 64-byte aligned, or in huge pages where the size is worth it: walks of large matrices then miss the TLB
// less. Only whole huge pages within the buffer are asked for, so no memory is used beyond it.
void* allocate_aligned(std::size_t bytes) {
  if (bytes < 2 * kHugePage) return std::aligned_alloc(kAlignment, bytes);
  void* data = nullptr;  // aligned_alloc would want a size in whole huge pages
  if (posix_memalign(&data, kHugePage, bytes) != 0) return nullptr;
  madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // a hint: may be refused
  return data;
}

struct FreeAligned {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeAligned>;

class CpuDeviceImpl final : public CpuDevice {
 public:
  explicit CpuDeviceImpl(const CpuDeviceOptions& options)
      : options_(options),
        scheduler_(options.order == CpuDeviceOptions::deferred ? cpu::make_deferred_scheduler(options.seed)
                                                               : cpu::make_eager_scheduler()) {}

  // Work that is dropped here may own memory.
  ~CpuDeviceImpl() override {
    closing_ = true;
    scheduler_.reset();
  }

  const CpuDeviceOptions& options() const override { return options_; }

  Buffer allocate(std::size_t bytes, Purpose purpose) override { return take(bytes, purpose, false); }
  Buffer allocate_host(std::size_t bytes, Purpose purpose) override { return take(bytes, purpose, true); }

  MemoryUse memory() const override {
    const std::lock_guard lock(mutex_);
    return use_;
  }

  Stream& create_stream(std::string name, StreamKind kind) override {
    const bool transfer = kind == StreamKind::transfer;
    streams_.push_back(std::make_unique<CpuStream>(std::move(name), *scheduler_, scheduler_->add_lane(),
                                                   scheduler_->runs_inline(transfer), transfer));
    return *streams_.back();
  }

  Event record(Stream& stream) override {
    const CpuStream& s = own(stream);
    return Event(s.runs_inline() ? scheduler_->record_inline() : scheduler_->record(s.lane()));
  }

  void wait(Stream& stream, const Event& event) override {
    const CpuStream& s = own(stream);
    if (const auto state = own(event)) scheduler_->wait(s.lane(), s.runs_inline(), state);
  }

  void synchronize(const Event& event) override {
    if (const auto state = own(event)) scheduler_->synchronize(state);
    collect();
  }

  void synchronize() override {
    scheduler_->synchronize();
    collect();
  }

  bool completed(const Event& event) override {
    const auto state = own(event);
    return !state || state->is_done();
  }

  double seconds_between(const Event& a, const Event& b) override {
    const auto from = own(a), to = own(b);
    if (!from || !to || !from->is_done() || !to->is_done())
      throw InternalError(
          "Device::seconds_between: an event is not complete or was never recorded -> synchronize it first");
    return std::chrono::duration<double>(to->when - from->when).count();
  }

  void copy(Stream& stream, void* to, const void* from, std::size_t bytes) override {
    own(stream).run([=] { std::memmove(to, from, bytes); });
  }
  void copy_to_device(Stream& stream, void* to, const void* from_host, std::size_t bytes) override {
    copy(stream, to, from_host, bytes);
  }
  void copy_to_host(Stream& stream, void* to_host, const void* from, std::size_t bytes) override {
    copy(stream, to_host, from, bytes);
  }
  void fill_zero(Stream& stream, void* to, std::size_t bytes) override {
    own(stream).run([=] { std::memset(to, 0, bytes); });
  }

  void set_idle_hook(std::function<void()> hook, double seconds) override {
    scheduler_->set_idle_hook(std::move(hook), seconds);
  }

 private:
  Buffer take(std::size_t bytes, Purpose purpose, bool host) {
    if (bytes == 0) return Buffer(this, nullptr, 0, purpose, host);
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* data = rounded < bytes ? nullptr : allocate_aligned(rounded);
    if (data == nullptr)
      throw InternalError(fmt::format(
          "out of memory: {} bytes for {} were refused, {} bytes are in use -> use fewer ranks on "
          "this machine, a larger shard size, or a smaller batch",
          bytes, name_of(purpose), total()));
    if (options_.poison || options_.order == CpuDeviceOptions::deferred) std::memset(data, 0xff, rounded);
    account(bytes, purpose);
    return Buffer(this, data, bytes, purpose, host);
  }

  void account(std::size_t bytes, Purpose purpose) {
    const std::lock_guard lock(mutex_);
    const auto p = static_cast<std::size_t>(purpose);
    use_.current[p] += bytes;
    total_ += bytes;
    use_.peak[p] = std::max(use_.peak[p], use_.current[p]);
    use_.total_peak = std::max(use_.total_peak, total_);
  }

  std::size_t total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }

  void release(void* data, std::size_t bytes, Purpose purpose, bool) noexcept override {
    Memory memory(data);
    {
      const std::lock_guard lock(mutex_);
      use_.current[static_cast<std::size_t>(purpose)] -= bytes;
      total_ -= bytes;
    }
    if (options_.order != CpuDeviceOptions::deferred || closing_ || scheduler_->idle()) return;
    // Recorded work may still use it: it stays readable, so that the fault is this message and not a crash.
    kept_.push_back(std::move(memory));
    if (purpose == Purpose::workspace) return;
    scheduler_->fail(std::make_exception_ptr(
        InternalError(fmt::format("a buffer of {} bytes ({}) was released while recorded work was pending -> "
                                  "call Device::synchronize() before freeing memory",
                                  bytes, name_of(purpose)))));
  }

  void collect() {
    if (scheduler_->idle()) kept_.clear();
  }

  CpuStream& own(Stream& stream) const {
    CpuStream& s = cpu_stream(stream);
    if (&s.scheduler() != scheduler_.get())
      throw InternalError("stream \"" + s.name() +
                          "\" belongs to another device -> use the device that made it");
    return s;
  }

  cpu::CpuEventPtr own(const Event& event) const {
    if (event.state() == nullptr) return nullptr;
    auto state = std::dynamic_pointer_cast<cpu::CpuEvent>(event.shared_state());
    if (!state || state->scheduler != scheduler_.get())
      throw InternalError("an event belongs to another device -> use the device that recorded it");
    return state;
  }

  CpuDeviceOptions options_;
  mutable std::mutex mutex_;
  MemoryUse use_;
  std::size_t total_ = 0;
  std::vector<Memory> kept_;  // deferred: released while work was pending
  std::vector<std::unique_ptr<CpuStream>> streams_;
  bool closing_ = false;
  std::unique_ptr<cpu::Scheduler> scheduler_;
};

}  // namespace

void CpuStream::enqueue(std::unique_ptr<cpu::Work> work) {
  cpu::Task task;
  task.work = std::move(work);
  scheduler_.enqueue(lane_, std::move(task));
}

void CpuStream::run_async(std::unique_ptr<AsyncOperation> operation) {
  if (!transfer_)
    throw InternalError("stream \"" + name() +
                        "\" is a compute stream -> put collectives on a transfer stream");
  cpu::Task task;
  task.kind = cpu::Task::Kind::operation;
  task.operation = std::move(operation);
  scheduler_.enqueue(lane_, std::move(task));
}

CpuStream& cpu_stream(Stream& stream) {
  auto* s = dynamic_cast<CpuStream*>(&stream);
  if (s == nullptr)
    throw InternalError("stream \"" + stream.name() +
                        "\" is not a CPU stream -> create it with the CPU device");
  return *s;
}

std::unique_ptr<CpuDevice> make_cpu_device(const CpuDeviceOptions& options) {
  return std::make_unique<CpuDeviceImpl>(options);
}

}  // namespace strata
