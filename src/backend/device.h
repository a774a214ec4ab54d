#pragma once
// Device: memory, streams and events. Everything above this contract enqueues work on streams and orders it
// with events; nothing above it reads device memory except through copy_to_host and a synchronised event.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace strata {

// What memory is for; the dry run and the metrics report by these.
enum class Purpose : std::uint8_t {
  weights,    // master shards, compute shards, gather slots
  gradients,  // gradient shards and full-size gradient slots
  moments,    // inner optimizer state
  outer,      // outer optimizer state and aggregation buffers
  activations,
  workspace,  // scratch of operations and collectives
  data,       // token batches and metrics
  count_
};
constexpr int kPurposes = static_cast<int>(Purpose::count_);
const char* name_of(Purpose);

// A stream runs what is enqueued on it in order. Backends derive their own; others hold it by reference.
class Stream {
 public:
  virtual ~Stream() = default;
  const std::string& name() const { return name_; }

 protected:
  explicit Stream(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

// State of an event shared between the device and holders of Event.
class EventState {
 public:
  virtual ~EventState() = default;
};

// A point in a stream: everything enqueued on that stream before Device::record. A default-constructed Event
// is complete. Cheap to copy. Completed events know when they completed (Device::seconds_between).
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<EventState> state) : state_(std::move(state)) {}
  EventState* state() const { return state_.get(); }
  const std::shared_ptr<EventState>& shared_state() const { return state_; }

 private:
  std::shared_ptr<EventState> state_;
};

class Device;

// Owns device (or pinned host) memory of one purpose. Movable, freed with its owner. 64-byte aligned or
// better.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device* device, void* data, std::size_t bytes, Purpose purpose, bool host)
      : device_(device), data_(data), bytes_(bytes), purpose_(purpose), host_(host) {}
  Buffer(Buffer&& o) noexcept { swap(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    Buffer(std::move(o)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }
  void swap(Buffer& o) noexcept {
    std::swap(device_, o.device_), std::swap(data_, o.data_), std::swap(bytes_, o.bytes_);
    std::swap(purpose_, o.purpose_), std::swap(host_, o.host_);
  }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Purpose purpose_ = Purpose::workspace;
  bool host_ = false;
};

struct MemoryUse {
  std::array<std::size_t, kPurposes> current{};  // bytes by Purpose
  std::array<std::size_t, kPurposes> peak{};     // each purpose's own peak
  std::size_t total_peak = 0;                    // peak of the sum
};

class Device {
 public:
  virtual ~Device() = default;

  // Uninitialised memory. Throws InternalError naming purpose and bytes when there is none left.
  virtual Buffer allocate(std::size_t bytes, Purpose purpose) = 0;
  // Host memory that copies may use asynchronously (pinned on a GPU).
  virtual Buffer allocate_host(std::size_t bytes, Purpose purpose) = 0;
  virtual MemoryUse memory() const = 0;

  // Streams live as long as the device. `compute` work is what the host enqueues as it goes; `transfer`
  // streams carry collectives and what surrounds them, and run beside compute.
  enum class StreamKind { compute, transfer };
  virtual Stream& create_stream(std::string name, StreamKind kind) = 0;

  virtual Event record(Stream& stream) = 0;
  virtual void wait(Stream& stream, const Event& event) = 0;  // stream's later work waits; the host does not
  virtual void synchronize(const Event& event) = 0;           // the host waits
  virtual void synchronize() = 0;                             // the host waits for every stream
  virtual bool completed(const Event& event) = 0;
  // Seconds from a's completion to b's. Both must be complete. Never synchronises.
  virtual double seconds_between(const Event& a, const Event& b) = 0;

  virtual void copy(Stream& stream, void* to, const void* from, std::size_t bytes) = 0;  // device to device
  virtual void copy_to_device(Stream& stream, void* to, const void* from_host, std::size_t bytes) = 0;
  virtual void copy_to_host(Stream& stream, void* to_host, const void* from, std::size_t bytes) = 0;
  virtual void fill_zero(Stream& stream, void* to, std::size_t bytes) = 0;

 private:
  friend class Buffer;
  virtual void release(void* data, std::size_t bytes, Purpose purpose, bool host) noexcept = 0;
};

}  // namespace strata
