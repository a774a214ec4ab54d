#include "cuda/emulation/options.h"
#include "tests/emulation/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/device_array.h"

#include <cstdlib>

using namespace strata;
using emulation::Options;
using emulation::Order;

TEST_CASE("each misuse is reported with its lines, and the next launch is unharmed") {
  for (const test::MisuseCase& wrong : test::misuse_cases()) {
    for (const auto order : {Order::forward, Order::reverse, Order::random}) {
      for (const auto fibers : {emulation::FiberKind::ucontext, emulation::default_fiber_kind()}) {
        Options options;
        options.threads = order;
        options.fibers = fibers;
        const emulation::ScopedOptions scope(options);
        std::string report;
        try {
          wrong.run();
        } catch (const emulation::Misuse& misuse) {
          report = misuse.what();
        }
        INFO("expected `" << wrong.report << "`, got: " << report);
        CHECK(report.find(wrong.report) != std::string::npos);
        for (const std::string& mark : wrong.marks) {
          CHECK(report.find(test::place_of("misuse.cu", "at:" + mark)) != std::string::npos);
        }
        CHECK_NOTHROW(test::launch_fill(64));
      }
    }
  }
}

TEST_CASE("a deadlock's report lists who waits where") {
  for (const test::MisuseCase& wrong : test::misuse_cases()) {
    if (wrong.report != "deadlock") continue;
    std::string report;
    try {
      wrong.run();
    } catch (const emulation::Misuse& misuse) {
      report = misuse.what();
    }
    INFO(report);
    CHECK(report.find("threads 3 wait in __syncthreads()") != std::string::npos);
    CHECK(report.find("threads 0-2, 4-31 wait in __syncwarp()") != std::string::npos);
  }
}

TEST_CASE("more than 48 KiB of dynamic shared memory works once it is asked for") {
  CHECK_NOTHROW(test::launch_large_dynamic());
}

TEST_CASE("the runtime refuses copies that leave an allocation or name the wrong side") {
  const test::DeviceArray<int> device(16);
  std::vector<int> host(32);
  CHECK(cudaMemcpy(device.data(), host.data(), 68, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(cudaMemcpy(device.data(), host.data(), 64, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(cudaMemset(device.data() + 8, 0, 36) == cudaErrorInvalidValue);
  CHECK(cudaMemset(device.data() + 8, 0, 32) == cudaSuccess);
  CHECK(cudaFree(device.data() + 1) == cudaErrorInvalidValue);
}

TEST_CASE("a word that no option has is refused by name") {
  ::setenv("STRATA_EMULATION_THREADS", "sideways", 1);
  CHECK_THROWS_AS(Options::from_environment(), std::invalid_argument);
  ::setenv("STRATA_EMULATION_THREADS", "reverse", 1);
  CHECK(Options::from_environment().threads == Order::reverse);
  ::unsetenv("STRATA_EMULATION_THREADS");
}
