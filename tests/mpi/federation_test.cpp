// Sharding, replication and federation over MPI: the counters of the real Communicator equal the plans, and
// the results equal those of ranks that are threads.
#include "tests/mpi/mpi_session.h"
#include "tests/support/catch.h"
#include "tests/support/federated_toy.h"

using namespace strata;
using strata::test::Ranks;

namespace {

FederatedCase make_case(const Mesh& mesh, OuterRule rule, FederationSchedule schedule) {
  FederatedCase c;
  c.mesh = mesh;
  c.steps = 7;
  c.engine.prefetch = 2;
  auto& f = c.federation;
  f.every = 3;
  f.last_step = c.steps;
  f.rule = rule;
  f.schedule = schedule;
  f.momentum = rule == OuterRule::fedavg ? 0 : 0.9;
  f.eta = rule == OuterRule::fedavg ? 1 : 0.7;
  f.alpha = schedule == FederationSchedule::streaming ? 0.5 : 0;
  f.fragment_layers = 1;
  f.one_replica = f.token_weights = true;
  return c;
}

std::vector<Mesh> meshes(int world) {
  std::vector<Mesh> all;
  for (int f = 1; f <= world; ++f)
    for (int r = 1; r <= world; ++r)
      if (world % f == 0 && world / f % r == 0) all.emplace_back(f, r, world / f / r);
  return all;
}

void require_equal_bytes(const ByteCounters& counted, const ByteCounters& planned) {
  for (const Traffic t : {Traffic::training, Traffic::edge})
    for (std::size_t k = 0; k < counted.entries[0].size(); ++k) {
      const auto collective = static_cast<Collective>(k);
      CAPTURE(static_cast<int>(t), name_of(collective));
      REQUIRE(counted.at(t, collective).received == planned.at(t, collective).received);
      REQUIRE(counted.at(t, collective).calls == planned.at(t, collective).calls);
    }
}

}  // namespace

TEST_CASE("on every mesh of this world, bytes equal the plan and parameters those of ranks as threads") {
  const int world_size = test::session().size();
  for (const bool eager : {true, false})
    for (const Mesh& mesh : meshes(world_size))
      for (const auto& [rule, schedule, wire] :
           {std::tuple{OuterRule::fedavg, FederationSchedule::overlap, DType::f32},
            {OuterRule::diloco, FederationSchedule::blocking, DType::i8},
            {OuterRule::fedmom, FederationSchedule::streaming, DType::bf16}}) {
        FederatedCase c = make_case(mesh, rule, schedule);
        c.federation.wire = wire;
        c.eager = eager;
        CAPTURE(mesh.describe(), eager, static_cast<int>(rule));
        Ranks ranks({eager ? CpuDeviceOptions::eager : CpuDeviceOptions::deferred,
                     static_cast<std::uint64_t>(mesh.federate() * 10 + mesh.replicate()), true});
        FederatedResult mine;
        {
          FederatedRank rank(*ranks.world, c, ranks.device.get());
          for (int step = 1; step <= c.steps; ++step) rank.step(step);
          mine = rank.result();
        }
        BytePlan plan;
        EngineOptions engine = c.engine;
        engine.moments = false;
        for (int step = 1; step <= c.steps; ++step) {
          plan += plan_step_bytes(make_units(3, false), mesh, ranks.rank, engine);
          plan += plan_federation_bytes(make_units(3, false), mesh, ranks.rank, engine.precision,
                                        c.federation, step);
        }
        require_equal_bytes(mine.shard, plan.shard);
        require_equal_bytes(mine.replicate, plan.replicate);
        require_equal_bytes(mine.federate, plan.federate);
        // One rank repeats the run with threads as ranks.
        if (ranks.rank == 0) CHECK((mine.parameters == train_federated(c)[0].parameters));
        ranks.world->barrier({Traffic::control, "next mesh", 0});
      }
}
