#include "train/backend_factory.h"

#include "backend/cpu/device.h"
#include "backend/cpu/ops.h"
#include "base/error.h"

namespace strata {

Backend make_backend(const Config& config, MpiSession& session, CollectiveObserver* observer) {
  if (config.device != "cpu") {
    throw UsageError("device is \"" + config.device + "\", this build has \"cpu\" -> set device to cpu");
  }
  CpuDeviceOptions options;
  options.order = config.stream_order == "deferred" ? CpuDeviceOptions::deferred : CpuDeviceOptions::eager;
  options.seed = config.seed;
  std::unique_ptr<CpuDevice> device = make_cpu_device(options);
  MpiOptions mpi;
  mpi.timeout_seconds = config.timeout_seconds;
  mpi.observer = observer;
  Backend backend;
  backend.ops = make_cpu_ops(*device, {.threads = config.threads});
  backend.world = make_mpi_world(session, *device, mpi);
  backend.device = std::move(device);
  return backend;
}

}  // namespace strata
