#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include "tests/mpi/mpi_session.h"

#include <numeric>
#include <optional>

#include "tests/support/catch.h"

namespace strata::test {
namespace {

std::optional<MpiSession>& holder() {
  static std::optional<MpiSession> s;
  return s;
}

#if __has_include(<catch2/catch_all.hpp>)
using ListenerBase = Catch::EventListenerBase;
#else
using ListenerBase = Catch::TestEventListenerBase;
#endif

struct SessionListener : ListenerBase {
  using ListenerBase::ListenerBase;
  void testRunStarting(const Catch::TestRunInfo&) override { holder().emplace(60.0); }
  void testRunEnded(const Catch::TestRunStats&) override { holder().reset(); }
};
CATCH_REGISTER_LISTENER(SessionListener)

}  // namespace

MpiSession& session() {
  return holder().value();
}

Ranks::Ranks(const CpuDeviceOptions& device_options, MpiOptions options)
    : device(make_cpu_device(device_options)),
      transfer(device->create_stream("transfer", Device::StreamKind::transfer)),
      compute(device->create_stream("compute", Device::StreamKind::compute)) {
  options.timeout_seconds = 30;
  world = make_mpi_world(session(), *device, options);
  rank = world->rank();
  size = world->size();
}

std::unique_ptr<Communicator> Ranks::everyone(const std::string& name) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world->group(name, ranks);
}

}  // namespace strata::test
