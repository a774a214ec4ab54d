// A program that goes wrong as its first argument says; failure.sh looks at what comes of it.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "backend/mpi/session.h"
#include "base/error.h"
#include "base/log.h"

using namespace strata;

namespace {

void hang() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

void run(const std::string& mode) {
  MpiSession session(30);
  configure_log(session.rank(), "");
  const auto device = make_cpu_device();
  MpiOptions options;
  options.timeout_seconds = 2;
  const auto world = make_mpi_world(session, *device, options);
  Stream& stream = device->create_stream("federate", Device::StreamKind::transfer);
  std::vector<int> all;
  for (int r = 0; r < world->size(); ++r) all.push_back(r);
  std::printf("pid %d\n", static_cast<int>(::getpid()));
  std::fflush(stdout);
  if (mode == "group_mismatch") {
    if (world->rank() == 1) std::reverse(all.begin(), all.end());
    world->group("shard", all);
    return;
  }
  const auto group = world->group("federate", all);
  if (mode == "error_exit") {
    if (world->rank() == 1) throw DataError("shard 7 is truncated -> copy it again");
    world->barrier({Traffic::control, "never complete", 0});
    return;
  }
  if (mode == "absent_barrier") {
    if (world->rank() == 2) hang();
    world->barrier({Traffic::control, "checkpoint", 40});
    return;
  }
  std::vector<float> data(100000, 1.0f);
  for (int step = 1; step <= 12 || mode == "killed"; ++step) {
    if (mode == "absent_collective" && step == 12 && world->rank() == 2) hang();
    group->all_reduce_sum(stream, {Traffic::training, "decoder.3", step}, {data.data(), DType::f32, 100000},
                          {});
    device->synchronize();
  }
  if (world->rank() == 0) std::printf("reached the end with %d rank(s)\n", world->size());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : "");
    return 0;
  } catch (const Error& error) {
    log_error("{}", error.what());
    MpiSession::abort(static_cast<int>(error.code()));
  }
}
