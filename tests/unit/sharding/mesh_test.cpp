#include "sharding/mesh.h"

#include "base/error.h"
#include "tests/support/catch.h"

using namespace strata;

namespace {

using Table = std::vector<std::vector<int>>;

// All distinct groups of a kind, in the order of their first members.
template <class F>
Table table(const Mesh& mesh, F group_of) {
  Table groups;
  for (int p = 0; p < mesh.size(); ++p) {
    auto group = group_of(p);
    if (group.front() == p) groups.push_back(std::move(group));
  }
  return groups;
}
Table shard_groups(const Mesh& m) {
  return table(m, [&](int p) { return m.shard_group(p); });
}
Table replica_groups(const Mesh& m) {
  return table(m, [&](int p) { return m.replica_group(p); });
}
Table federation_peers(const Mesh& m) {
  return table(m, [&](int p) { return m.federation_peers(p); });
}
Table federation_groups(const Mesh& m) {
  return table(m, [&](int p) { return m.federation_group(p); });
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("groups of 8 ranks with F=2, S=4 are those of the paper's artifact") {
  const Mesh mesh(2, 1, 4);
  CHECK(shard_groups(mesh) == Table{{0, 1, 2, 3}, {4, 5, 6, 7}});
  CHECK(federation_peers(mesh) == Table{{0, 4}, {1, 5}, {2, 6}, {3, 7}});
  CHECK(replica_groups(mesh) == Table{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}});
}

TEST_CASE("groups and senders of 16 ranks with F=2, R=2, S=4 are those of the paper's artifact") {
  const Mesh mesh(2, 2, 4);
  CHECK(shard_groups(mesh) == Table{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  CHECK(replica_groups(mesh) == Table{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}});
  CHECK(federation_peers(mesh) ==
        Table{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}});
  CHECK(mesh.senders(0) == std::vector<int>{0, 5, 2, 7});
  CHECK(mesh.senders(1) == std::vector<int>{8, 13, 10, 15});
}

TEST_CASE("groups of 12 ranks with F=3, R=2, S=2") {
  const Mesh mesh(3, 2, 2);
  CHECK(shard_groups(mesh) == Table{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}});
  CHECK(replica_groups(mesh) == Table{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}});
  CHECK(federation_peers(mesh) == Table{{0, 4, 8}, {1, 5, 9}, {2, 6, 10}, {3, 7, 11}});
  CHECK(federation_groups(mesh) == Table{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}});
  CHECK(mesh.senders(2) == std::vector<int>{8, 11});
}

TEST_CASE("coordinates and positions are each other's inverse") {
  const Mesh mesh(3, 4, 5);
  for (int p = 0; p < mesh.size(); ++p) CHECK(mesh.position(mesh.coordinates(p)) == p);
  CHECK_THROWS_AS(mesh.coordinates(60), InternalError);
}

TEST_CASE("a mesh that does not fill the world is refused with the arithmetic") {
  const Mesh mesh(2, 2, 4);
  CHECK_NOTHROW(mesh.require_world(16));
  CHECK_THAT(message_of([&] { mesh.require_world(12); }),
             Catch::Matchers::Contains("federate 2 x replicate 2 x shard 4 = 16 ranks, but 12 were started"));
  CHECK_THAT(message_of([] { Mesh(2, 0, 4); }), Catch::Matchers::Contains("mesh.replicate is 0"));
  CHECK_THAT(message_of([] { Mesh(1 << 16, 1 << 16, 1); }), Catch::Matchers::Contains("more ranks"));
}
