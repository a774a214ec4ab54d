#pragma once
// A ParameterSource for tests: one process, whole units. It behaves like a strict sharding engine. Weights
// are copied into slots on a stream of their own and gradients copied out of slots, ordered by events; a slot
// holds NaN whenever nobody leases it, so work enqueued outside a lease shows; and every lease is written to
// a log.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "backend/device.h"
#include "backend/units.h"
#include "base/error.h"

namespace strata::test {

class MemorySource final : public ParameterSource, public LeaseOwner {
 public:
  // With `accumulating`, gradients of further micro-steps add to those of the first since begin_step().
  MemorySource(Device& device, Stream& compute, const std::vector<UnitSpec>& units, DType weights,
               DType gradients)
      : device_(device),
        compute_(compute),
        transfer_(device.create_stream("units", Device::StreamKind::transfer)),
        units_(units),
        counted_(units.size(), false) {
    std::size_t largest = 0;
    for (const UnitSpec& unit : units_) {
      weights_.push_back(store(unit, weights, Purpose::weights));
      gradients_.push_back(store(unit, gradients, Purpose::gradients));
      largest = std::max({largest, weights_.back().buffer.bytes(), gradients_.back().buffer.bytes()});
    }
    poison_ = device_.allocate(largest, Purpose::workspace);
    const std::vector<std::uint8_t> pattern(largest, 0xff);  // NaN in fp32 and in bf16
    device_.copy_to_device(transfer_, poison_.data(), pattern.data(), largest);
    for (int i = 0; i < kSlots; ++i) {
      slots_.push_back({device_.allocate(largest, Purpose::weights), {}, -1, 0, false});
      device_.copy(transfer_, slots_.back().buffer.data(), poison_.data(), largest);
    }
    device_.synchronize(device_.record(transfer_));
  }

  // The last slots are still being poisoned: their memory must not go before that is done.
  ~MemorySource() override {
    try {
      device_.synchronize();
    } catch (const std::exception&) {
      // The device had failed already, which the test has seen at an earlier wait; it drops what was left.
    }
  }
  MemorySource(const MemorySource&) = delete;
  MemorySource& operator=(const MemorySource&) = delete;

  Flat weights(int unit) const { return weights_[unit].flat; }
  Flat gradient_sum(int unit) const { return gradients_[unit].flat; }
  Stream& transfer() { return transfer_; }
  // The next gradients overwrite; weights are copied only once `changed` is complete.
  void begin_step(const Event& changed = {}) {
    counted_.assign(units_.size(), false);
    device_.wait(transfer_, changed);
  }
  // The compute stream may read the gradients and change the weights afterwards.
  void end_step() { device_.wait(compute_, device_.record(transfer_)); }

  Lease weights(int unit, Pass pass) override {
    log.push_back("weights " + units_[unit].name + (pass == Pass::forward ? " forward" : " backward"));
    return lease(unit, false, weights_[unit], false);
  }
  Lease gradient(int unit) override {
    log.push_back("gradient " + units_[unit].name);
    return lease(unit, true, gradients_[unit], counted_[unit]);
  }

  void release(std::int64_t ticket) override {
    Slot& slot = slot_of(ticket);
    log.push_back(std::string("release ") + (slot.is_gradient ? "gradient " : "weights ") +
                  units_[slot.unit].name);
    device_.wait(transfer_, device_.record(compute_));
    if (slot.is_gradient) {
      device_.copy(transfer_, gradients_[slot.unit].buffer.data(), slot.buffer.data(),
                   gradients_[slot.unit].buffer.bytes());
      counted_[slot.unit] = true;
    }
    device_.copy(transfer_, slot.buffer.data(), poison_.data(), slot.buffer.bytes());
    slot.ticket = 0, slot.unit = -1;
  }
  void check(std::int64_t ticket) const override { const_cast<MemorySource*>(this)->slot_of(ticket); }

  std::vector<std::string> log;  // "weights decoder.0 forward", "release gradient head", ...

 private:
  static constexpr int kSlots = 4;
  struct Store {
    Buffer buffer;
    Flat flat;
  };
  struct Slot {
    Buffer buffer;
    Flat flat;
    int unit = -1;
    std::int64_t ticket = 0;  // 0: free
    bool is_gradient = false;
  };

  Store store(const UnitSpec& unit, DType dtype, Purpose purpose) {
    Store s{device_.allocate(size_of(dtype) * static_cast<std::size_t>(unit.elements), purpose), {}};
    s.flat = {s.buffer.data(), dtype, unit.elements};
    return s;
  }

  Lease lease(int unit, bool is_gradient, const Store& source, bool accumulate) {
    Slot* free = nullptr;
    for (int i = 0; i < kSlots; ++i) {
      Slot& slot = slots_[(next_slot_ + i) % kSlots];
      if (slot.ticket != 0 && slot.unit == unit && slot.is_gradient == is_gradient) {
        throw InternalError("unit " + units_[unit].name + " was leased twice at once");
      }
      if (slot.ticket == 0 && free == nullptr) free = &slot;
    }
    if (free == nullptr) throw InternalError("more than four leases at once");
    next_slot_ = (next_slot_ + 1) % kSlots;
    if (!is_gradient || accumulate)
      device_.copy(transfer_, free->buffer.data(), source.buffer.data(), source.buffer.bytes());
    device_.wait(compute_, device_.record(transfer_));
    free->unit = unit, free->ticket = ++last_ticket_, free->is_gradient = is_gradient;
    free->flat = {free->buffer.data(), source.flat.dtype, source.flat.count};
    return Lease(this, free->ticket, free->flat, accumulate);
  }

  Slot& slot_of(std::int64_t ticket) {
    for (Slot& slot : slots_) {
      if (slot.ticket == ticket) return slot;
    }
    throw InternalError("a lease was used or released after its release");
  }

  Device& device_;
  Stream &compute_, &transfer_;
  std::vector<UnitSpec> units_;
  std::vector<Store> weights_, gradients_;
  std::vector<bool> counted_;
  Buffer poison_;
  std::vector<Slot> slots_;
  int next_slot_ = 0;
  std::int64_t last_ticket_ = 0;
};

}  // namespace strata::test
