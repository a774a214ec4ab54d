// The CPU device in eager mode: order, events, accounts, errors, asynchronous operations.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backend/cpu/device.h"
#include "base/error.h"
#include "tests/support/catch.h"

using namespace strata;
using Kind = Device::StreamKind;

namespace {

void nap(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// Finishes after `polls` polls; writes the order of starts and ends into a log of the communication thread.
class Countdown final : public AsyncOperation {
 public:
  Countdown(std::vector<std::string>& log, std::string name, int polls)
      : log_(log), name_(std::move(name)), left_(polls) {}
  void start() override { log_.push_back("start " + name_); }
  Progress progress() override {
    if (left_-- > 0) return Progress::none;
    log_.push_back("end " + name_);
    return Progress::done;
  }

 private:
  std::vector<std::string>& log_;
  std::string name_;
  int left_;
};

}  // namespace

TEST_CASE("eager: compute work runs inline in the calling thread, before run returns") {
  const auto device = make_cpu_device();
  CpuStream& compute = cpu_stream(device->create_stream("compute", Kind::compute));
  std::thread::id id;
  compute.run([&] { id = std::this_thread::get_id(); });
  CHECK(id == std::this_thread::get_id());
  CHECK(device->completed(device->record(compute)));
  CHECK_THROWS_AS(compute.run([] { throw DataError("at once"); }), DataError);
  CHECK_NOTHROW(device->synchronize());
}

TEST_CASE("eager: a transfer stream runs in order on one other thread, beside the host") {
  const auto device = make_cpu_device();
  CpuStream& a = cpu_stream(device->create_stream("a", Kind::transfer));
  CpuStream& b = cpu_stream(device->create_stream("b", Kind::transfer));
  std::vector<int> order;
  std::thread::id ida, idb;
  std::atomic<bool> open{false};
  a.run([&] {
    while (!open) std::this_thread::yield();
    ida = std::this_thread::get_id();
  });
  for (int i = 0; i < 100; ++i) a.run([&order, i] { order.push_back(i); });
  const Event done = device->record(a);
  b.run([&] { idb = std::this_thread::get_id(); });
  CHECK_FALSE(device->completed(done));
  open = true;
  device->synchronize(done);
  CHECK(device->completed(done));
  device->synchronize();
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
  CHECK(ida == idb);
  CHECK(ida != std::this_thread::get_id());
}

TEST_CASE("eager: a stream that waits for an event runs after it") {
  const auto device = make_cpu_device();
  Stream& compute = device->create_stream("compute", Kind::compute);
  Stream& a = device->create_stream("a", Kind::transfer);
  Stream& b = device->create_stream("b", Kind::transfer);
  int x = 0, seen_by_b = 0, seen_by_compute = 0;
  cpu_stream(a).run([&] { nap(5), x = 1; });
  const Event written = device->record(a);
  device->wait(b, written);
  cpu_stream(b).run([&] { seen_by_b = x, x = 2; });
  device->wait(compute, device->record(b));
  cpu_stream(compute).run([&] { seen_by_compute = x; });
  CHECK(seen_by_compute == 2);
  CHECK(seen_by_b == 1);
}

TEST_CASE("eager: operations start in program order over all streams and overlap") {
  const auto device = make_cpu_device();
  CpuStream& a = cpu_stream(device->create_stream("a", Kind::transfer));
  CpuStream& b = cpu_stream(device->create_stream("b", Kind::transfer));
  CpuStream& c = cpu_stream(device->create_stream("c", Kind::transfer));
  std::vector<std::string> log;
  std::atomic<bool> open{false};
  a.run([&] {
    while (!open) std::this_thread::yield();
  });
  device->wait(b, device->record(a));
  // 1 must wait for its event, so 2 and 3 must not start before it although nothing else holds them.
  b.run_async(std::make_unique<Countdown>(log, "1", 1000));
  c.run_async(std::make_unique<Countdown>(log, "2", 10));
  a.run_async(std::make_unique<Countdown>(log, "3", 0));
  open = true;
  device->synchronize();
  const std::vector<std::string> starts{"start 1", "start 2", "start 3"};
  std::vector<std::string> seen;
  for (const auto& line : log)
    if (line.starts_with("start")) seen.push_back(line);
  CHECK(seen == starts);
  CHECK(log.back() == "end 1");
}

TEST_CASE("eager: operations belong on transfer streams") {
  const auto device = make_cpu_device();
  CpuStream& compute = cpu_stream(device->create_stream("compute", Kind::compute));
  std::vector<std::string> log;
  CHECK_THROWS_AS(compute.run_async(std::make_unique<Countdown>(log, "x", 0)), InternalError);
}

TEST_CASE("eager: an error on the communication thread reaches the host's next wait and drops later work") {
  const auto device = make_cpu_device();
  Stream& compute = device->create_stream("compute", Kind::compute);
  CpuStream& a = cpu_stream(device->create_stream("a", Kind::transfer));
  bool later = false;
  a.run([] { throw DataError("lost"); });
  a.run([&] { later = true; });
  const Event event = device->record(a);
  SECTION("synchronize(event)") {
    CHECK_THROWS_AS(device->synchronize(event), DataError);
  }
  SECTION("synchronize()") {
    CHECK_THROWS_WITH(device->synchronize(), "lost");
  }
  SECTION("a compute stream that waits") {
    CHECK_THROWS_AS(device->wait(compute, event), DataError);
  }
  CHECK_THROWS_AS(device->synchronize(), DataError);
  CHECK_FALSE(later);
}

TEST_CASE("eager: an operation that throws does not keep later ones from their turn") {
  class Broken final : public AsyncOperation {
    void start() override { throw NetworkError("cut"); }
    Progress progress() override { return Progress::done; }
  };
  const auto device = make_cpu_device();
  CpuStream& a = cpu_stream(device->create_stream("a", Kind::transfer));
  CpuStream& b = cpu_stream(device->create_stream("b", Kind::transfer));
  std::vector<std::string> log;
  a.run_async(std::make_unique<Broken>());
  b.run_async(std::make_unique<Countdown>(log, "1", 3));
  CHECK_THROWS_AS(device->synchronize(), NetworkError);
  CHECK(log.empty());
}

TEST_CASE("events know when they completed") {
  const auto device = make_cpu_device();
  Stream& a = device->create_stream("a", Kind::transfer);
  const Event before = device->record(a);
  cpu_stream(a).run([] { nap(20); });
  const Event after = device->record(a);
  device->synchronize(after);
  CHECK(device->seconds_between(before, after) >= 0.019);
  CHECK(device->seconds_between(before, after) < 5.0);
  CHECK(device->seconds_between(after, before) == -device->seconds_between(before, after));
  CHECK(device->completed(Event()));
  CHECK_THROWS_AS(device->seconds_between(Event(), after), InternalError);
}

TEST_CASE("memory is accounted by purpose, with peaks") {
  const auto device = make_cpu_device();
  const auto weights = static_cast<std::size_t>(Purpose::weights);
  const auto data = static_cast<std::size_t>(Purpose::data);
  {
    const Buffer a = device->allocate(1000, Purpose::weights);
    CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 64 == 0);
    {
      const Buffer b = device->allocate(500, Purpose::weights);
      CHECK(device->memory().current[weights] == 1500);
    }
    const Buffer c = device->allocate_host(700, Purpose::data);
    CHECK(device->memory().current[data] == 700);
  }
  const MemoryUse use = device->memory();
  CHECK(use.current[weights] == 0);
  CHECK(use.current[data] == 0);
  CHECK(use.peak[weights] == 1500);
  CHECK(use.peak[data] == 700);
  CHECK(use.total_peak == 1700);
  CHECK_FALSE(device->allocate(0, Purpose::weights));
  // A size that no machine has; its rounding up to the alignment would overflow.
  CHECK_THROWS_WITH(device->allocate(std::size_t(-1), Purpose::moments),
                    Catch::Contains("moments") && Catch::Contains("18446744073709551615"));
}

TEST_CASE("poison: fresh memory reads as NaN") {
  CpuDeviceOptions options;
  options.poison = true;
  const auto device = make_cpu_device(options);
  const Buffer a = device->allocate(4096, Purpose::activations);
  CHECK(std::isnan(a.as<float>()[0]));
  CHECK(std::isnan(a.as<double>()[511]));
}

TEST_CASE("copies and zero fills run in stream order") {
  const auto device = make_cpu_device();
  Stream& a = device->create_stream("a", Kind::transfer);
  const Buffer x = device->allocate(16, Purpose::data), y = device->allocate(16, Purpose::data);
  const float in[4] = {1, 2, 3, 4};
  float out[4] = {};
  device->copy_to_device(a, x.data(), in, sizeof in);
  device->copy(a, y.data(), x.data(), 16);
  device->fill_zero(a, x.data(), 16);
  device->copy(a, y.data(), x.data(), 4);
  device->copy_to_host(a, out, y.data(), sizeof out);
  device->synchronize(device->record(a));
  CHECK(out[0] == 0);
  CHECK(out[3] == 4);
}

TEST_CASE("streams and events of another device are refused") {
  const auto one = make_cpu_device(), two = make_cpu_device();
  Stream& a = one->create_stream("a", Kind::compute);
  Stream& b = two->create_stream("b", Kind::compute);
  CHECK_THROWS_AS(two->record(a), InternalError);
  CHECK_THROWS_AS(two->wait(b, one->record(a)), InternalError);
}

TEST_CASE("eager: a device can go away with work in its queues") {
  std::atomic<int> ran{0};
  {
    const auto device = make_cpu_device();
    CpuStream& a = cpu_stream(device->create_stream("a", Kind::transfer));
    for (int i = 0; i < 1000; ++i) a.run([&] { ++ran; });
  }
  CHECK(ran <= 1000);
}

TEST_CASE("eager: the idle hook runs while there is nothing to do") {
  std::atomic<int> calls{0};
  const auto device = make_cpu_device();
  device->set_idle_hook([&] { ++calls; }, 1e-3);
  CpuStream& a = cpu_stream(device->create_stream("a", Kind::transfer));
  a.run([] {});
  for (int i = 0; i < 2000 && calls < 3; ++i) nap(1);
  CHECK(calls >= 3);
}
