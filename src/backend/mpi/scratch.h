#pragma once
// Scratch memory of collectives: allocated once, reused, accounted as workspace.
#include <cstddef>
#include <utility>
#include <vector>

#include "backend/device.h"

namespace strata::mpi {

// Used by the thread that runs collectives. Grows to as many blocks as operations were in flight at once.
class ScratchPool {
 public:
  explicit ScratchPool(Device& device) : device_(device) {}

  class Lease {
   public:
    Lease() = default;
    Lease(ScratchPool* pool, Buffer buffer) : pool_(pool), buffer_(std::move(buffer)) {}
    Lease(Lease&& o) noexcept : pool_(std::exchange(o.pool_, nullptr)), buffer_(std::move(o.buffer_)) {}
    Lease& operator=(Lease&& o) noexcept {
      std::swap(pool_, o.pool_);
      buffer_.swap(o.buffer_);
      return *this;
    }
    ~Lease() {
      if (pool_ != nullptr && buffer_) pool_->free_.push_back(std::move(buffer_));
    }
    char* data() const { return buffer_.as<char>(); }

   private:
    ScratchPool* pool_ = nullptr;
    Buffer buffer_;
  };

  // The smallest free block that is large enough. When none is, a free one makes way for a larger one.
  Lease acquire(std::size_t bytes);

 private:
  Device& device_;
  std::vector<Buffer> free_;
};

}  // namespace strata::mpi
