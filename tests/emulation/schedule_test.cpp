#include "cuda/emulation/options.h"
#include "tests/emulation/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/device_array.h"

#include <numeric>

using namespace strata;
using emulation::CopyTime;
using emulation::Options;
using emulation::Order;
using test::Fault;

namespace {

// Whether the kernel's numbers are right in this schedule.
bool right(Fault fault, Order order, CopyTime copies, std::uint64_t seed = 0) {
  Options options;
  options.threads = order;
  options.copies = copies;
  options.seed = seed;
  options.race_detector = false;
  const emulation::ScopedOptions scope(options);
  std::vector<float> in(256);
  std::iota(in.begin(), in.end(), 1.0f);
  const test::DeviceArray<float> source(in);
  const test::DeviceArray<float> target(256);
  test::launch_reverse(target.data(), source.data(), fault);
  const auto out = target.download();
  for (std::size_t i = 0; i < 256; ++i) {
    if (!(out[i] == in[i / 64 * 64 + 63 - i % 64])) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("a correct kernel is right in every schedule") {
  for (const auto copies : {CopyTime::at_issue, CopyTime::at_wait}) {
    CHECK(right(Fault::none, Order::forward, copies));
    CHECK(right(Fault::none, Order::reverse, copies));
    for (std::uint64_t seed = 0; seed < 5; ++seed) CHECK(right(Fault::none, Order::random, copies, seed));
  }
}

TEST_CASE("a missing barrier is a wrong number in every thread order") {
  for (const auto copies : {CopyTime::at_issue, CopyTime::at_wait}) {
    CHECK_FALSE(right(Fault::no_barrier, Order::forward, copies));
    CHECK_FALSE(right(Fault::no_barrier, Order::reverse, copies));
    for (std::uint64_t seed = 0; seed < 5; ++seed)
      CHECK_FALSE(right(Fault::no_barrier, Order::random, copies, seed));
  }
}

TEST_CASE("a wait that is one group short shows with late copies and hides with early ones") {
  CHECK(right(Fault::wait_short, Order::forward, CopyTime::at_issue));
  CHECK_FALSE(right(Fault::wait_short, Order::forward, CopyTime::at_wait));
}

TEST_CASE("a buffer refilled before all have read it shows with early copies and hides with late ones") {
  CHECK_FALSE(right(Fault::refill_early, Order::forward, CopyTime::at_issue));
  CHECK(right(Fault::refill_early, Order::forward, CopyTime::at_wait));
}
