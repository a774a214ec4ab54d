#pragma once
// The one place that chooses an implementation of the backend contracts.
#include <memory>

#include "backend/communicator.h"
#include "backend/device.h"
#include "backend/mpi/session.h"
#include "backend/ops.h"
#include "config/config.h"

namespace strata {

// The world and the operations use the device, so they go first.
struct Backend {
  std::unique_ptr<Device> device;
  std::unique_ptr<Ops> ops;
  std::unique_ptr<World> world;
};

// Throws UsageError for a device this build has not. `observer`: told of all collectives; outlives the
// backend.
Backend make_backend(const Config& config, MpiSession& session, CollectiveObserver* observer = nullptr);

}  // namespace strata
