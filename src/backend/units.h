#pragma once
// Units: how a model shows its parameters to whoever stores them. The model describes its units once, then
// leases each unit's full weights and gradients while it computes; it never knows whether they are sharded.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "backend/tensor.h"

namespace strata {

struct ParameterSpec {
  std::string name;                 // Hugging Face's name, "model.layers.0.self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;  // as Hugging Face stores it
  std::int64_t offset = 0;          // in elements, within the unit's flat buffer; no gaps between parameters
  std::int64_t count = 0;           // elements
  float initial_std = 0;            // > 0: normal with this deviation; 0: filled with ones (norm weights)
  bool is_norm = false;             // norm weights: no weight decay by default
};

enum class UnitKind : std::uint8_t {
  embedding,  // untied: gathered once (its backward reads no weights)
  decoder,    // gathered in forward and again in backward (unless reshard_after_forward is false)
  head,       // untied: final norm + output matrix; its backward follows its forward: gathered once
  root,       // tied: embedding + final norm; gathered once, kept to the end of backward; one gradient
};

struct UnitSpec {
  std::string name;  // "embedding", "decoder.0", ..., "head" or "root"
  UnitKind kind = UnitKind::decoder;
  std::vector<ParameterSpec> parameters;
  std::int64_t elements = 0;  // before padding
};

// Whoever hands out leases. `ticket` identifies one lease.
class LeaseOwner {
 public:
  virtual ~LeaseOwner() = default;
  virtual void release(std::int64_t ticket) = 0;
  // Throws InternalError when the ticket is released or its slot has been given to another unit or version.
  virtual void check(std::int64_t ticket) const = 0;
};

// RAII lease of a unit's full-size flat buffer, valid for work enqueued on the compute stream until it is
// released. Use after release or after a move throws InternalError.
class Lease {
 public:
  Lease() = default;
  Lease(LeaseOwner* owner, std::int64_t ticket, Flat data, bool accumulate = false)
      : owner_(owner), ticket_(ticket), data_(data), accumulate_(accumulate) {}
  Lease(Lease&& o) noexcept { swap(o); }
  Lease& operator=(Lease&& o) noexcept {
    Lease(std::move(o)).swap(*this);
    return *this;
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    if (owner_ != nullptr) owner_->release(ticket_);
  }
  void release() { Lease().swap(*this); }
  Flat flat() const;  // checked
  Flat parameter(const ParameterSpec& p) const { return flat().slice(p.offset, p.count); }
  // Gradient leases: false when the buffer's content is stale and must be overwritten, true when it counts.
  bool accumulate() const { return accumulate_; }
  explicit operator bool() const { return owner_ != nullptr; }
  void swap(Lease& o) noexcept {
    std::swap(owner_, o.owner_), std::swap(ticket_, o.ticket_);
    std::swap(data_, o.data_), std::swap(accumulate_, o.accumulate_);
  }

 private:
  LeaseOwner* owner_ = nullptr;
  std::int64_t ticket_ = 0;
  Flat data_;
  bool accumulate_ = false;
};

// What the model asks for. Leases are ordered after the gather on the compute stream; releasing a gradient
// lease starts its reduction. Units are asked for in order in forward and in reverse order in backward.
class ParameterSource {
 public:
  virtual ~ParameterSource() = default;
  enum class Pass : std::uint8_t { forward, backward };
  virtual Lease weights(int unit, Pass pass) = 0;  // compute dtype
  virtual Lease gradient(int unit) = 0;            // gradient dtype
};

}  // namespace strata
