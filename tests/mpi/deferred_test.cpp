// Deferred mode over many ranks: seeded orders differ from rank to rank, results do not; a missing event
// shows.
#include <string>
#include <vector>

#include "tests/mpi/mpi_session.h"
#include "tests/support/catch.h"

using namespace strata;
using strata::test::Ranks;
using Kind = Device::StreamKind;

namespace {

CpuDeviceOptions deferred(int seed, int rank) {
  CpuDeviceOptions options;
  options.order = CpuDeviceOptions::deferred;
  options.seed = static_cast<std::uint64_t>(seed * 1000 + rank);
  return options;
}

// A few steps of gather, compute, reduce with events as an engine has them; returns x[0] after them. `omit`
// leaves out the event between compute and the reduction.
double steps(int seed, bool omit) {
  Ranks ranks(deferred(seed, test::session().rank()));
  const auto all = ranks.everyone();
  Stream& gathers = ranks.device->create_stream("gather", Kind::transfer);
  Stream& reduces = ranks.device->create_stream("reduce", Kind::transfer);
  const int n = ranks.size;
  constexpr std::int64_t kShard = 100;
  const Buffer full = ranks.device->allocate(static_cast<std::size_t>(kShard * n) * 8, Purpose::weights);
  const Buffer gradient =
      ranks.device->allocate(static_cast<std::size_t>(kShard * n) * 8, Purpose::gradients);
  const Buffer shard = ranks.device->allocate(kShard * 8, Purpose::weights);
  const Buffer shard_gradient = ranks.device->allocate(kShard * 8, Purpose::gradients);
  auto *w = full.as<double>(), *g = gradient.as<double>(), *s = shard.as<double>(),
       *sg = shard_gradient.as<double>();
  const int rank = ranks.rank;
  cpu_stream(ranks.compute).run([=] {
    for (std::int64_t i = 0; i < kShard; ++i) s[i] = 1.0 + static_cast<double>(i) + 10.0 * rank;
  });
  double seen = 0;
  for (int step = 1; step <= 4; ++step) {
    ranks.device->wait(gathers, ranks.device->record(ranks.compute));
    all->all_gather(gathers, {Traffic::training, "u", step}, {w, DType::f64, kShard * n},
                    {s, DType::f64, kShard});
    ranks.device->wait(ranks.compute, ranks.device->record(gathers));
    cpu_stream(ranks.compute).run([=] {
      for (std::int64_t i = 0; i < kShard * n; ++i) g[i] = 0.25 * w[i] + rank;
    });
    if (!omit) ranks.device->wait(reduces, ranks.device->record(ranks.compute));
    all->reduce_scatter(reduces, {Traffic::training, "u", step}, {sg, DType::f64, kShard},
                        {g, DType::f64, kShard * n}, {});
    ranks.device->wait(ranks.compute, ranks.device->record(reduces));
    cpu_stream(ranks.compute).run([=] {
      for (std::int64_t i = 0; i < kShard; ++i) s[i] -= 0.125 * sg[i];
    });
    // Only some ranks look at numbers in between: a host that waits must not need the others to wait as well.
    if ((step + rank) % 2 == 0) {
      ranks.device->copy_to_host(ranks.compute, &seen, s, 8);
      ranks.device->synchronize(ranks.device->record(ranks.compute));
    }
  }
  ranks.device->copy_to_host(ranks.compute, &seen, s, 8);
  ranks.device->synchronize();
  return seen;
}

double expected() {
  const int n = test::session().size();
  double w = 1.0 + 10.0 * test::session().rank();
  for (int step = 0; step < 4; ++step) {
    double sum = 0;
    for (int r = 0; r < n; ++r) sum += 0.25 * w + r;
    w -= 0.125 * sum;
  }
  return w;
}

}  // namespace

TEST_CASE("deferred ranks: any legal order gives the same numbers, and nobody hangs") {
  for (int seed = 0; seed < 40; ++seed) CHECK(steps(seed, false) == expected());
}

TEST_CASE("deferred ranks: a missing event shows as a wrong number for some seed") {
  int wrong = 0;
  for (int seed = 0; seed < 40; ++seed) wrong += steps(seed, true) != expected();
  Ranks ranks;
  const auto counts = ranks.world->gather_strings({Traffic::control, "test", 0}, std::to_string(wrong));
  int total = 0;
  for (const auto& c : counts) total += std::stoi(c);
  CHECK(total > 0);
}

TEST_CASE("deferred ranks: two groups on two streams start in program order") {
  for (int seed = 0; seed < 30; ++seed) {
    Ranks ranks(deferred(seed, test::session().rank()));
    const auto one = ranks.everyone("one"), two = ranks.everyone("two");
    Stream& a = ranks.device->create_stream("a", Kind::transfer);
    Stream& b = ranks.device->create_stream("b", Kind::transfer);
    float x = 1, y = 2, z = 3;
    one->all_reduce_sum(a, {}, {&x, DType::f32, 1}, {});
    two->all_reduce_sum(b, {}, {&y, DType::f32, 1}, {});
    // The barrier needs the collectives of nobody, but every rank must have started what others wait for.
    if (ranks.rank == 0) ranks.device->synchronize(ranks.device->record(b));
    ranks.world->barrier({Traffic::control, "in between", 0});
    one->all_reduce_sum(b, {}, {&z, DType::f32, 1}, {});
    ranks.device->synchronize();
    CHECK(x == static_cast<float>(ranks.size));
    CHECK(y == static_cast<float>(2 * ranks.size));
    CHECK(z == static_cast<float>(3 * ranks.size));
  }
}
