#pragma once
// Tests under mpiexec: every rank runs all cases, in the same order, on one MpiSession. Options are small, so
// that cutting into messages and slices happens at small counts.
#include <memory>

#include "backend/communicator.h"
#include "backend/cpu/device.h"
#include "backend/mpi/session.h"

namespace strata::test {

MpiSession& session();

// A device and a world on it.
struct Ranks {
  explicit Ranks(const CpuDeviceOptions& device_options = {}, MpiOptions options = {});
  std::unique_ptr<CpuDevice> device;
  Stream& transfer;
  Stream& compute;
  std::unique_ptr<World> world;
  int rank, size;

  std::unique_ptr<Communicator> everyone(const std::string& name = "all");
};

}  // namespace strata::test
