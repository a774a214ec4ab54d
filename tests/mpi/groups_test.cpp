// Groups of a mesh, collectives of several groups in flight, host-side helpers, scratch.
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "tests/mpi/mpi_session.h"
#include "tests/support/catch.h"

using namespace strata;
using strata::test::Ranks;
using Kind = Device::StreamKind;

namespace {
const CollectiveLabel kLabel{Traffic::training, "unit", 1};
}

TEST_CASE("gather_strings keeps rank order, with empty and long strings") {
  Ranks ranks;
  for (const std::size_t length : {std::size_t{0}, std::size_t{3}, std::size_t{300000}}) {
    const auto text = [&](int r) {
      return r % 3 == 2 ? std::string()
                        : std::string(length + static_cast<std::size_t>(r), static_cast<char>('a' + r));
    };
    const auto all = ranks.world->gather_strings({Traffic::control, "test", 0}, text(ranks.rank));
    REQUIRE(static_cast<int>(all.size()) == ranks.size);
    for (int r = 0; r < ranks.size; ++r) CHECK(all[static_cast<std::size_t>(r)] == text(r));
    ranks.world->barrier({Traffic::control, "test", 0});
  }
}

TEST_CASE("group order is the order of the list") {
  Ranks ranks;
  std::vector<int> reversed;
  for (int r = ranks.size - 1; r >= 0; --r) reversed.push_back(r);
  const auto group = ranks.world->group("reversed", reversed);
  CHECK(group->rank() == ranks.size - 1 - ranks.rank);
  CHECK(group->size() == ranks.size);
  CHECK(group->world_ranks() == reversed);
  CHECK(group->name() == "reversed");
  const Buffer data = ranks.device->allocate(static_cast<std::size_t>(ranks.size) * 4, Purpose::data);
  auto* x = data.as<float>();
  x[group->rank()] = static_cast<float>(ranks.rank);
  group->all_gather(ranks.transfer, kLabel, {x, DType::f32, ranks.size}, {x + group->rank(), DType::f32, 1});
  ranks.device->synchronize();
  for (int i = 0; i < ranks.size; ++i) CHECK(x[i] == static_cast<float>(ranks.size - 1 - i));
}

TEST_CASE("a group without this rank, with a rank twice or out of range is refused") {
  Ranks ranks;
  CHECK_THROWS_AS(ranks.world->group("x", {}), InternalError);
  CHECK_THROWS_AS(ranks.world->group("x", {ranks.rank, ranks.rank}), InternalError);
  CHECK_THROWS_AS(ranks.world->group("x", {ranks.rank, ranks.size}), InternalError);
  CHECK_THROWS_AS(ranks.world->group("x", {ranks.rank + 1}), InternalError);
}

TEST_CASE("collectives of different groups and streams are in flight together and do not mix") {
  MpiOptions options;
  options.message_bytes = 4096, options.scratch_bytes = 16384;
  Ranks ranks({}, options);
  // Rows and columns of a grid two wide, and everyone; the last rank of an odd world is alone in its row.
  std::vector<int> row, column, all(static_cast<std::size_t>(ranks.size));
  std::iota(all.begin(), all.end(), 0);
  for (int r = 0; r < ranks.size; ++r) {
    if (r / 2 == ranks.rank / 2) row.push_back(r);
    if (r % 2 == ranks.rank % 2) column.push_back(r);
  }
  std::unique_ptr<Communicator> groups[3] = {ranks.world->group("shard", row),
                                             ranks.world->group("replicate", column),
                                             ranks.world->group("world", all)};
  const std::vector<int>* members[3] = {&row, &column, &all};
  Stream* streams[3] = {&ranks.device->create_stream("a", Kind::transfer),
                        &ranks.device->create_stream("b", Kind::transfer),
                        &ranks.device->create_stream("c", Kind::transfer)};
  constexpr int kRounds = 20;
  constexpr std::int64_t kCount = 5003;
  std::vector<Buffer> data;
  for (int round = 0; round < kRounds; ++round)
    for (int g = 0; g < 3; ++g) {
      data.push_back(ranks.device->allocate(kCount * 4, Purpose::data));
      auto* x = data.back().as<float>();
      for (std::int64_t i = 0; i < kCount; ++i)
        x[i] = static_cast<float>((ranks.rank + 1) * (round + 1) * (g + 1) + static_cast<int>(i % 17));
      // Two streams of one group overlap as well: the group of a stream moves round by round.
      groups[g]->all_reduce_sum(*streams[(g + round) % 3], kLabel, {x, DType::f32, kCount}, {});
    }
  ranks.device->synchronize();
  std::int64_t wrong = 0;
  for (int round = 0; round < kRounds; ++round)
    for (int g = 0; g < 3; ++g) {
      const auto* x = data[static_cast<std::size_t>(round * 3 + g)].as<float>();
      for (std::int64_t i = 0; i < kCount; ++i) {
        float sum = 0;
        for (const int r : *members[g])
          sum += static_cast<float>((r + 1) * (round + 1) * (g + 1) + static_cast<int>(i % 17));
        wrong += x[i] != sum;
      }
    }
  CHECK(wrong == 0);
}

TEST_CASE("collectives overlap compute and are ordered with it by events") {
  Ranks ranks;
  const auto all = ranks.everyone();
  const Buffer data = ranks.device->allocate(4000, Purpose::data);
  auto* x = data.as<float>();
  for (int step = 0; step < 50; ++step) {
    cpu_stream(ranks.compute).run([=, &ranks] {
      for (int i = 0; i < 1000; ++i) x[i] = static_cast<float>(ranks.rank + step);
    });
    ranks.device->wait(ranks.transfer, ranks.device->record(ranks.compute));
    all->all_reduce_mean(ranks.transfer, kLabel, {x, DType::f32, 1000}, nullptr, {});
    ranks.device->wait(ranks.compute, ranks.device->record(ranks.transfer));
    float seen = -1;
    cpu_stream(ranks.compute).run([&] { seen = x[999]; });
    CHECK(seen == static_cast<float>(ranks.size - 1) / 2 + static_cast<float>(step));
  }
}

TEST_CASE("scratch is allocated once, bounded, reused and accounted as workspace") {
  MpiOptions options;
  options.scratch_bytes = 1 << 20;
  Ranks ranks({}, options);
  const auto all = ranks.everyone();
  const Buffer data = ranks.device->allocate(16 << 20, Purpose::data);
  std::memset(data.data(), 0, data.bytes());
  const auto workspace = static_cast<std::size_t>(Purpose::workspace);
  std::size_t after_first = 0;
  for (int round = 0; round < 3; ++round) {
    all->all_reduce_sum(ranks.transfer, kLabel, {data.data(), DType::f32, 4 << 20}, {});
    ranks.device->synchronize();
    if (round == 0) after_first = ranks.device->memory().current[workspace];
  }
  CHECK(ranks.device->memory().peak[workspace] == after_first);
  CHECK(after_first <= (2u << 20) + 4096);
  CHECK((after_first > 0) == (ranks.size > 1));
}

TEST_CASE("collectives on a compute stream are refused") {
  Ranks ranks;
  if (ranks.size == 1) return;
  const auto all = ranks.everyone();
  float x = 0;
  CHECK_THROWS_AS(all->all_reduce_sum(ranks.compute, kLabel, {&x, DType::f32, 1}, {}), InternalError);
}
