#include "sharding/engine.h"

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/toy_training.h"
#include "tests/support/units.h"

using namespace strata;
using Pass = ParameterSource::Pass;

namespace {

struct Case {
  Mesh mesh{1, 1, 1};
  bool tied = false;
  EngineOptions options;
  std::uint64_t seed = 0;
  bool eager = false;
};

// What every rank saw of one step.
struct Seen {
  std::vector<std::vector<float>> parameters, gradients;  // by unit
  ByteCounters shard, replicate;
  MemoryUse memory;
  std::int64_t padding_sum = 0;  // bit patterns past the units' ends
};

CpuDeviceOptions device_options(const Case& c, int rank) {
  CpuDeviceOptions o;
  o.order = c.eager ? CpuDeviceOptions::eager : CpuDeviceOptions::deferred;
  o.seed = c.seed * 100 + static_cast<std::uint64_t>(rank);
  o.poison = true;
  return o;
}

std::int64_t padding_of(const UnitShard& shard) {
  std::int64_t used = 0, sum = 0;
  for (const auto& s : shard.segments) used = std::max(used, s.begin + s.count);
  for (const Flat& flat : {shard.parameter, shard.compute, shard.gradient, shard.m, shard.v})
    for (std::int64_t i = used; flat && i < shard.count; ++i)
      sum += std::abs(read_element(flat.data, flat.dtype, i)) > 0;
  return sum;
}

std::vector<Seen> run_step(const Case& c, int steps = 1) {
  std::vector<Seen> seen(static_cast<std::size_t>(c.mesh.size()));
  run_ranks(c.mesh.size(), [&](World& world) {
    ToyRank rank(world, c.mesh, make_units(3, c.tied), c.options, device_options(c, world.rank()));
    Seen& mine = seen[static_cast<std::size_t>(world.rank())];
    for (int step = 1; step <= steps; ++step) {
      rank.engine->begin_step(step);
      for (int k = 0; k < c.options.micro_steps; ++k) rank.micro_step(k, k * c.mesh.size() + world.rank());
      rank.engine->finish_gradients();
    }
    rank.device->synchronize();
    mine.memory = rank.device->memory();
    mine.shard = rank.groups.shard->counters();
    mine.replicate = rank.groups.replicate->counters();
    for (const auto& shard : rank.engine->shards()) mine.padding_sum += padding_of(shard);
    for (int u = 0; u < static_cast<int>(rank.engine->units().size()); ++u) {
      mine.parameters.push_back(rank.engine->gather_parameters(u));
      mine.gradients.push_back(rank.engine->gather_gradients(u));
    }
  });
  return seen;
}

// Largest difference between a rank's gradients and their definition, relative to the largest gradient.
double worst_error(const Case& c, const Seen& seen) {
  double worst = 0, largest = 0;
  for (std::size_t u = 0; u < seen.gradients.size(); ++u)
    for (std::size_t i = 0; i < seen.gradients[u].size(); ++i) {
      double sum = 0;
      for (int d = 0; d < c.mesh.size() * c.options.micro_steps; ++d)
        sum += ToyRank::slope(d, static_cast<int>(u), static_cast<std::int64_t>(i)) +
               ToyRank::kCurvature * seen.parameters[u][i];
      worst = std::max(worst, std::abs(sum - seen.gradients[u][i]));
      largest = std::max(largest, std::abs(sum));
    }
  return worst / largest;
}

void require_equal_bytes(const ByteCounters& counted, const ByteCounters& planned) {
  for (const Traffic t : {Traffic::training, Traffic::edge, Traffic::evaluation})
    for (std::size_t k = 0; k < counted.entries[0].size(); ++k) {
      const auto collective = static_cast<Collective>(k);
      CAPTURE(static_cast<int>(t), name_of(collective));
      REQUIRE(counted.at(t, collective).received == planned.at(t, collective).received);
      REQUIRE(counted.at(t, collective).calls == planned.at(t, collective).calls);
    }
}

void check_case(const Case& c, double tolerance) {
  CAPTURE(c.mesh.describe(), c.tied, c.options.micro_steps, c.options.accumulate_full, c.options.prefetch,
          c.options.reshard_after_forward, c.seed, c.eager);
  const auto seen = run_step(c);
  const auto units = make_units(3, c.tied);
  const auto memory = engine_memory(units, c.mesh, c.options);
  for (int p = 0; p < c.mesh.size(); ++p) {
    const Seen& mine = seen[static_cast<std::size_t>(p)];
    CAPTURE(p);
    REQUIRE(worst_error(c, mine) < tolerance);
    REQUIRE(mine.gradients == seen[0].gradients);
    REQUIRE(mine.parameters == seen[0].parameters);
    REQUIRE(mine.padding_sum == 0);
    const BytePlan plan = plan_step_bytes(units, c.mesh, p, c.options);
    require_equal_bytes(mine.shard, plan.shard);
    require_equal_bytes(mine.replicate, plan.replicate);
    for (const Purpose purpose : {Purpose::weights, Purpose::gradients, Purpose::moments, Purpose::workspace})
      REQUIRE(mine.memory.current[static_cast<std::size_t>(purpose)] ==
              memory[static_cast<std::size_t>(purpose)]);
  }
}

Case make_case(const Mesh& mesh) {
  Case c;
  c.mesh = mesh;
  return c;
}

EngineOptions with_precision(const char* precision, const char* reduce) {
  EngineOptions o;
  o.precision = Precision::from(precision, reduce);
  return o;
}

}  // namespace

TEST_CASE("gradients are the sum over all ranks, bytes and memory follow the plan, for any shard size") {
  for (const int shards : {1, 2, 3, 5, 7, 16})
    for (const bool tied : {false, true}) {
      Case c = make_case(Mesh(1, 1, shards));
      c.tied = tied;
      c.seed = static_cast<std::uint64_t>(shards);
      check_case(c, 2e-6);
    }
}

TEST_CASE("micro-steps, replicas and both ways of accumulating give the same sums") {
  for (const Mesh& mesh : {Mesh(1, 1, 1), Mesh(1, 4, 1), Mesh(1, 1, 3), Mesh(1, 2, 3)})
    for (const bool full : {false, true})
      for (const bool tied : {false, true}) {
        Case c = make_case(mesh);
        c.tied = tied;
        c.options.micro_steps = 3;
        c.options.accumulate_full = full;
        check_case(c, 2e-6);
      }
}

TEST_CASE("prefetch depth and resharding change neither values nor, for decoders resharded, bytes") {
  for (const int prefetch : {0, 1, 2, 3, 8})
    for (const bool reshard : {true, false})
      for (const bool tied : {false, true}) {
        Case c = make_case(Mesh(1, 2, 2));
        c.tied = tied;
        c.options.prefetch = prefetch;
        c.options.reshard_after_forward = reshard;
        c.options.micro_steps = 2;
        check_case(c, 2e-6);
      }
}

TEST_CASE("every legal order of streams gives the same bits") {
  for (const int prefetch : {0, 1, 2}) {
    Case c = make_case(Mesh(1, 2, 2));
    c.options.micro_steps = 2;
    c.options.prefetch = prefetch;
    const auto first = run_step(c, 2);
    REQUIRE(worst_error(c, first[0]) < 2e-6);
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
      c.seed = seed;
      c.eager = seed % 5 == 0;
      const auto other = run_step(c, 2);
      CAPTURE(seed, prefetch);
      for (std::size_t p = 0; p < first.size(); ++p) REQUIRE(other[p].gradients == first[p].gradients);
    }
  }
}

TEST_CASE("precisions: what is gathered, written and reduced has its own dtype") {
  // Largest gradient about 1; a bf16 value is good to 2^-9 of itself, sums of 12 to a few times that.
  for (const auto& [precision, reduce, tolerance] : {std::tuple{"bf16", "fp32", 3e-3},
                                                     {"bf16", "bf16", 2e-2},
                                                     {"bf16_pure", "bf16", 3e-2},
                                                     {"bf16_pure", "fp32", 3e-2},
                                                     {"fp32", "bf16", 2e-2}})
    for (const Mesh& mesh : {Mesh(1, 1, 1), Mesh(1, 2, 1), Mesh(1, 1, 2), Mesh(1, 2, 3)})
      for (const bool full : {false, true}) {
        Case c = make_case(mesh);
        c.options = with_precision(precision, reduce);
        c.options.accumulate_full = full;
        c.options.micro_steps = 2;
        CAPTURE(precision, reduce);
        check_case(c, tolerance);
      }
}

TEST_CASE("initial weights are the same bits on every mesh") {
  const auto one = run_step(make_case(Mesh(1, 1, 1)));
  for (const Mesh& mesh : {Mesh(2, 1, 1), Mesh(1, 2, 1), Mesh(1, 1, 5), Mesh(2, 1, 3)})
    CHECK(run_step(make_case(mesh))[1].parameters == one[0].parameters);
  // The norms are ones, the matrices are not.
  CHECK(one[0].parameters[1].back() == 1.0f);
  CHECK(std::abs(one[0].parameters[1].front()) < 0.2f);
}

TEST_CASE("evaluation gathers every unit once, on an account of its own") {
  for (const bool tied : {false, true}) {
    const Mesh mesh(1, 1, 3);
    std::vector<ByteCounters> counted(3);
    run_ranks(3, [&](World& world) {
      ToyRank rank(world, mesh, make_units(3, tied), {}, {CpuDeviceOptions::deferred, 5, true});
      rank.evaluate(4);
      rank.evaluate(4);
      rank.device->synchronize();
      counted[static_cast<std::size_t>(world.rank())] = rank.groups.shard->counters();
    });
    BytePlan plan = plan_evaluation_bytes(make_units(3, tied), mesh, {});
    plan += BytePlan(plan);
    for (const auto& counters : counted) require_equal_bytes(counters, plan.shard);
  }
}

TEST_CASE("misused leases throw") {
  for (const int shards : {1, 2}) {
    std::vector<std::string> wrong(static_cast<std::size_t>(shards));
    run_ranks(shards, [&](World& world) {
      ToyRank rank(world, Mesh(1, 1, shards), make_units(3, false), {}, {});
      ShardingEngine& engine = *rank.engine;
      std::string& report = wrong[static_cast<std::size_t>(world.rank())];
      const auto expect = [&report](const char* what, const char* part, const std::function<void()>& act) {
        try {
          act();
          report += std::string(what) + ": nothing thrown; ";
        } catch (const InternalError& e) {
          if (std::string(e.what()).find(part) == std::string::npos)
            report += std::string(what) + ": " + e.what() + "; ";
        }
      };
      engine.begin_step(1);
      engine.begin_micro_step(0);
      Lease a = engine.weights(0, Pass::forward);
      expect("second lease", "leased already", [&] { (void)engine.weights(0, Pass::forward); });
      expect("unknown unit", "units 0 to 4", [&] { (void)engine.weights(5, Pass::forward); });
      Lease moved = std::move(a);
      expect("use after move", "after its release", [&] { (void)a.flat(); });
      (void)moved.flat();
      moved.release();
      expect("use after release", "after its release", [&] { (void)moved.flat(); });
      expect("out of order", "expected was decoder.0 in forward",
             [&] { (void)engine.weights(2, Pass::forward); });
      expect("embedding backward", "expected was decoder.0",
             [&] { (void)engine.weights(0, Pass::backward); });
      Lease stale = engine.weights(1, Pass::forward);
      Lease gradient = engine.gradient(1);
      expect("second gradient lease", "leased already", [&] { (void)engine.gradient(1); });
      expect("unfinished step", "was never written", [&] { engine.finish_gradients(); });
      gradient.release();
      expect("gradient twice", "a second time", [&] { (void)engine.gradient(1); });
      engine.begin_step(2);
      expect("stale version", "stale", [&] { (void)stale.flat(); });
      stale.release();
      engine.begin_micro_step(0);
      (void)engine.weights(0, Pass::forward).flat();
      rank.device->synchronize();
    });
    for (const auto& report : wrong) CHECK(report == "");
  }
}

TEST_CASE("a second weights lease finds no slot when leases are hoarded") {
  std::string message;
  run_ranks(2, [&](World& world) {
    EngineOptions options;
    options.prefetch = 0;
    ToyRank rank(world, Mesh(1, 1, 2), make_units(3, false), options, {});
    rank.engine->begin_step(1);
    rank.engine->begin_micro_step(0);
    { const Lease embedding = rank.engine->weights(0, Pass::forward); }
    const Lease hoarded = rank.engine->weights(1, Pass::forward);
    try {
      (void)rank.engine->weights(2, Pass::forward);
    } catch (const InternalError& e) {
      if (world.rank() == 0) message = e.what();
    }
  });
  CHECK_THAT(message, Catch::Matchers::Contains("no slot is free for the weights of decoder.1"));
}
