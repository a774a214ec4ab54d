#include "backend/mpi/scratch.h"

namespace strata::mpi {

ScratchPool::Lease ScratchPool::acquire(std::size_t bytes) {
  std::size_t best = free_.size();
  for (std::size_t i = 0; i < free_.size(); ++i)
    if (free_[i].bytes() >= bytes && (best == free_.size() || free_[i].bytes() < free_[best].bytes()))
      best = i;
  if (best == free_.size()) {
    if (!free_.empty()) free_.pop_back();
    return Lease(this, device_.allocate(bytes, Purpose::workspace));
  }
  Buffer block = std::move(free_[best]);
  free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
  return Lease(this, std::move(block));
}

}  // namespace strata::mpi
