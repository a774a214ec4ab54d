// The CPU device in deferred mode: legal orders, late waits, and that a missing event shows.
#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backend/cpu/device.h"
#include "base/error.h"
#include "tests/support/catch.h"

using namespace strata;
using Kind = Device::StreamKind;

namespace {

std::unique_ptr<CpuDevice> deferred(std::uint64_t seed) {
  CpuDeviceOptions options;
  options.order = CpuDeviceOptions::deferred;
  options.seed = seed;
  return make_cpu_device(options);
}

class Logged final : public AsyncOperation {
 public:
  Logged(std::vector<int>& starts, int number, int polls) : starts_(starts), number_(number), left_(polls) {}
  void start() override { starts_.push_back(number_); }
  Progress progress() override { return left_-- <= 0 ? Progress::done : Progress::some; }

 private:
  std::vector<int>& starts_;
  int number_, left_;
};

// Producer on a transfer stream, consumer on the compute stream, with or without the event between them.
float consume(std::uint64_t seed, bool with_event) {
  const auto device = deferred(seed);
  Stream& compute = device->create_stream("compute", Kind::compute);
  Stream& transfer = device->create_stream("transfer", Kind::transfer);
  const Buffer x = device->allocate(4, Purpose::data), y = device->allocate(4, Purpose::data);
  const float three = 3;
  device->copy_to_device(transfer, x.data(), &three, 4);
  const Event written = device->record(transfer);
  if (with_event) device->wait(compute, written);
  float* from = x.as<float>();
  float* to = y.as<float>();
  cpu_stream(compute).run([=] { *to = 2 * *from; });
  float result = 0;
  device->copy_to_host(compute, &result, y.data(), 4);
  const Event done = device->record(compute);
  device->synchronize(done);
  device->synchronize();
  return result;
}

}  // namespace

TEST_CASE("deferred: nothing runs before a wait, and completed advances nothing") {
  const auto device = deferred(1);
  Stream& compute = device->create_stream("compute", Kind::compute);
  int x = 0;
  cpu_stream(compute).run([&] { x = 1; });
  const Event event = device->record(compute);
  CHECK_FALSE(device->completed(event));
  CHECK(x == 0);
  device->synchronize(event);
  CHECK(device->completed(event));
  CHECK(x == 1);
}

TEST_CASE("deferred: a missing event shows as a wrong number for some seed, and none does with it") {
  int wrong = 0, right = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    CHECK(consume(seed, true) == 6.0f);
    if (consume(seed, false) == 6.0f) {
      ++right;
    } else {
      ++wrong;
    }
  }
  CHECK(wrong >= 5);
  CHECK(right >= 5);
}

TEST_CASE("deferred: a write that overtakes a reader of another stream shows, too") {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const auto device = deferred(seed);
    CpuStream& reader = cpu_stream(device->create_stream("reader", Kind::transfer));
    CpuStream& writer = cpu_stream(device->create_stream("writer", Kind::compute));
    int slot = 1, read = 0;
    reader.run([&] { read = slot; });
    writer.run([&] { slot = 2; });
    device->synchronize();
    if (read != 1) ++wrong;
  }
  CHECK(wrong >= 5);
}

TEST_CASE("deferred: the same seed gives the same order, different seeds give many") {
  const auto order_of = [](std::uint64_t seed) {
    const auto device = deferred(seed);
    std::string order;
    std::vector<CpuStream*> streams;
    for (const char* name : {"a", "b", "c"})
      streams.push_back(&cpu_stream(device->create_stream(name, Kind::transfer)));
    for (int i = 0; i < 4; ++i)
      for (CpuStream* s : streams) s->run([&order, s] { order += s->name(); });
    device->synchronize();
    return order;
  };
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CHECK(order_of(seed) == order_of(seed));
    orders.insert(order_of(seed));
  }
  CHECK(orders.size() >= 20);
  CHECK(
      std::any_of(orders.begin(), orders.end(), [](const std::string& o) { return o.starts_with("cccc"); }));
}

// Random programs: every task checks that what it must follow (its stream's earlier tasks, the events its
// stream has waited for) has run, and that operations start in program order.
TEST_CASE("deferred: random programs run in legal orders and every wait ends") {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    const auto device = deferred(seed * 7 + 1);
    constexpr int kStreams = 4;
    std::vector<Stream*> streams;
    std::vector<std::vector<int>> must(kStreams);  // tasks that the next task of a stream must follow
    for (int s = 0; s < kStreams; ++s)
      streams.push_back(&device->create_stream(std::to_string(s), Kind::transfer));
    std::vector<char> ran(400, 0);
    std::vector<std::pair<Event, std::vector<int>>> events;
    std::vector<int> starts;
    int operations = 0, violations = 0;
    for (int task = 0; task < 400; ++task) {
      const auto s = static_cast<std::size_t>(random() % kStreams);
      CpuStream& stream = cpu_stream(*streams[s]);
      switch (random() % 8) {
        case 0:
          stream.run_async(std::make_unique<Logged>(starts, operations++, static_cast<int>(random() % 5)));
          break;
        case 1:
          events.emplace_back(device->record(stream), must[s]);
          break;
        case 2:
          if (!events.empty()) {
            const auto& [event, after] = events[random() % events.size()];
            device->wait(stream, event);
            must[s].insert(must[s].end(), after.begin(), after.end());
          }
          break;
        case 3:
          if (!events.empty() && random() % 8 == 0) {
            const auto& [event, after] = events[random() % events.size()];
            device->synchronize(event);
            for (const int t : after) violations += ran[static_cast<std::size_t>(t)] ? 0 : 1;
          }
          break;
        default:
          stream.run([&ran, &violations, task, after = must[s]] {
            for (const int t : after) violations += ran[static_cast<std::size_t>(t)] ? 0 : 1;
            ran[static_cast<std::size_t>(task)] = 1;
          });
          must[s].push_back(task);
      }
    }
    device->synchronize();
    CHECK(violations == 0);
    REQUIRE(starts.size() == static_cast<std::size_t>(operations));
    CHECK(std::is_sorted(starts.begin(), starts.end()));
  }
}

TEST_CASE("deferred: some waits run only what they need") {
  int untouched = 0, more = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const auto device = deferred(seed);
    CpuStream& a = cpu_stream(device->create_stream("a", Kind::transfer));
    CpuStream& b = cpu_stream(device->create_stream("b", Kind::compute));
    int others = 0;
    for (int i = 0; i < 5; ++i) b.run([&] { ++others; });
    a.run([] {});
    const Event event = device->record(a);
    a.run([&] { ++others; });
    device->synchronize(event);
    if (others == 0) {
      ++untouched;
    } else {
      ++more;
    }
    device->synchronize();
    CHECK(others == 6);
  }
  CHECK(untouched >= 15);
  CHECK(more >= 8);
}

TEST_CASE("deferred: errors of recorded work are rethrown by the wait") {
  const auto device = deferred(3);
  CpuStream& compute = cpu_stream(device->create_stream("compute", Kind::compute));
  bool later = false;
  CHECK_NOTHROW(compute.run([] { throw NonFiniteError("nan"); }));
  compute.run([&] { later = true; });
  CHECK_THROWS_AS(device->synchronize(device->record(compute)), NonFiniteError);
  CHECK_THROWS_AS(device->synchronize(), NonFiniteError);
  CHECK_FALSE(later);
}

TEST_CASE("deferred: memory released while work is pending fails the next wait, scratch is kept") {
  for (const Purpose purpose : {Purpose::activations, Purpose::workspace}) {
    const auto device = deferred(4);
    CpuStream& compute = cpu_stream(device->create_stream("compute", Kind::compute));
    float seen = 0;
    {
      const Buffer x = device->allocate(4, purpose);
      float* p = x.as<float>();
      compute.run([=] { *p = 5; });
      compute.run([=, &seen] { seen = *p; });
    }
    if (purpose == Purpose::workspace) {
      device->synchronize();
      CHECK(seen == 5);
    } else {
      CHECK_THROWS_WITH(device->synchronize(),
                        Catch::Contains("activations") && Catch::Contains("synchronize"));
    }
    CHECK(device->memory().current[static_cast<std::size_t>(purpose)] == 0);
  }
}

TEST_CASE("deferred: fresh memory reads as NaN") {
  const auto device = deferred(5);
  const Buffer x = device->allocate(8, Purpose::weights);
  CHECK(std::isnan(x.as<float>()[1]));
}
