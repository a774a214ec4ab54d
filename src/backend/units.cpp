#include "backend/units.h"

#include "base/error.h"

namespace strata {

Flat Lease::flat() const {
  if (owner_ == nullptr) {
    throw InternalError("a parameter lease was used after its release -> lease the unit again");
  }
  owner_->check(ticket_);
  return data_;
}

}  // namespace strata
