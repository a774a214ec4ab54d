#include "optim/optimizer.h"

#include <cmath>

#include "base/error.h"
#include "tests/support/catch.h"
#include "tests/support/toy_training.h"
#include "tests/support/units.h"

using namespace strata;

namespace {

constexpr int kWorld = 6, kSteps = 4;
constexpr double kTokens = 5;  // a rank and micro-step

struct Result {
  std::vector<std::vector<float>> parameters;  // by unit
  std::vector<StepScale> scales;               // by step
};

struct Case {
  Mesh mesh{1, 1, 1};
  int micro_steps = 1;
  OptimizerOptions optimizer;
  EngineOptions engine;
  int steps = kSteps;
  int poisoned_step = 0, poisoned_rank = 0;  // where a gradient is infinite
};

double rate(int step) {
  return 0.01 / step;
}

std::vector<Result> train(Case c) {
  c.engine.micro_steps = c.micro_steps;
  c.engine.moments = c.optimizer.adamw;
  std::vector<Result> results(static_cast<std::size_t>(c.mesh.size()));
  run_ranks(c.mesh.size(), [&](World& world) {
    Result& mine = results[static_cast<std::size_t>(world.rank())];
    ToyRank rank(world, c.mesh, make_units(2, false), c.engine,
                 {CpuDeviceOptions::deferred, static_cast<std::uint64_t>(world.rank()), true});
    Optimizer optimizer(*rank.engine, rank.groups, *rank.device, *rank.ops, rank.compute, c.optimizer);
    const Buffer tokens = rank.device->allocate(sizeof(double), Purpose::data);
    *tokens.as<double>() = kTokens * c.micro_steps;
    mine.scales.resize(kSteps);
    for (int step = 1; step <= c.steps; ++step) {
      rank.engine->begin_step(step);
      for (int k = 0; k < c.micro_steps; ++k) rank.micro_step(k, k * c.mesh.size() + world.rank());
      rank.engine->finish_gradients();
      if (step == c.poisoned_step && world.rank() == c.poisoned_rank) {
        float* g = static_cast<float*>(rank.engine->shards()[0].gradient.data);
        cpu_stream(rank.compute).run([g] { *g = INFINITY; });
      }
      optimizer.step(step, rate(step), tokens.as<double>());
      rank.device->copy_to_host(rank.compute, &mine.scales[static_cast<std::size_t>(step - 1)],
                                optimizer.scale(), sizeof(StepScale));
    }
    rank.device->synchronize();
    for (int u = 0; u < 4; ++u) mine.parameters.push_back(rank.engine->gather_parameters(u));
  });
  return results;
}

// The same training in double precision, without any mesh.
struct Twin {
  std::vector<std::vector<double>> w, m, v;
  std::vector<double> norms;
};

Twin twin(const Case& c, const std::vector<std::vector<float>>& initial, int batches) {
  Twin t;
  for (const auto& unit : initial) t.w.emplace_back(unit.begin(), unit.end());
  for (const auto& unit : t.w) t.m.emplace_back(unit.size(), 0.0), t.v.emplace_back(unit.size(), 0.0);
  const auto units = make_units(2, false);
  const double tokens = kTokens * batches;
  const auto& o = c.optimizer;
  for (int step = 1; step <= kSteps; ++step) {
    auto g = t.w;
    double squares = 0;
    for (std::size_t u = 0; u < g.size(); ++u)
      for (std::size_t i = 0; i < g[u].size(); ++i) {
        double sum = 0;
        for (int d = 0; d < batches; ++d)
          sum += ToyRank::slope(d, static_cast<int>(u), static_cast<std::int64_t>(i)) +
                 ToyRank::kCurvature * t.w[u][i];
        g[u][i] = sum / tokens;
        squares += g[u][i] * g[u][i];
      }
    const double norm = std::sqrt(squares), clip = o.clip > 0 && norm > o.clip ? o.clip / norm : 1;
    t.norms.push_back(norm);
    for (std::size_t u = 0; u < g.size(); ++u)
      for (const auto& p : units[u].parameters)
        for (std::int64_t e = p.offset; e < p.offset + p.count; ++e) {
          const auto i = static_cast<std::size_t>(e);
          const double x = g[u][i] * clip, decay = p.is_norm && !o.decay_norms ? 0 : o.weight_decay;
          double &w = t.w[u][i], &m = t.m[u][i], &v = t.v[u][i];
          if (!o.adamw) {
            w -= rate(step) * (x + decay * w);
            continue;
          }
          m = o.beta1 * m + (1 - o.beta1) * x;
          v = o.beta2 * v + (1 - o.beta2) * x * x;
          const double mh = m / (1 - std::pow(o.beta1, step)), vh = v / (1 - std::pow(o.beta2, step));
          w -= rate(step) * (mh / (std::sqrt(vh) + o.eps) + decay * w);
        }
  }
  return t;
}

double worst_difference(const std::vector<std::vector<float>>& a, const std::vector<std::vector<double>>& b) {
  double worst = 0;
  for (std::size_t u = 0; u < a.size(); ++u)
    for (std::size_t i = 0; i < a[u].size(); ++i) worst = std::max(worst, std::abs(a[u][i] - b[u][i]));
  return worst;
}

std::vector<std::vector<float>> initial_parameters() {
  std::vector<std::vector<float>> initial;
  run_ranks(1, [&](World& world) {
    ToyRank rank(world, Mesh(1, 1, 1), make_units(2, false), {}, {});
    for (int u = 0; u < 4; ++u) initial.push_back(rank.engine->gather_parameters(u));
  });
  return initial;
}

Case make_case(const Mesh& mesh) {
  Case c;
  c.mesh = mesh;
  c.micro_steps = kWorld * 2 / mesh.size();  // the same batches on every mesh
  c.optimizer.eps = 1e-4;                    // keeps rounding differences of tiny gradients tiny
  c.optimizer.clip = 1;
  return c;
}

}  // namespace

TEST_CASE("AdamW and SGD on any mesh equal a double-precision twin, norms and clipping included") {
  const auto initial = initial_parameters();
  for (const bool adamw : {true, false})
    for (const bool decay_norms : {false, true})
      for (const Mesh& mesh : {Mesh(1, 1, 1), Mesh(1, 6, 1), Mesh(1, 1, 6), Mesh(1, 2, 3), Mesh(1, 3, 2)}) {
        Case c = make_case(mesh);
        c.optimizer.adamw = adamw;
        c.optimizer.decay_norms = decay_norms;
        CAPTURE(mesh.describe(), adamw, decay_norms);
        const auto results = train(c);
        const Twin t = twin(c, initial, kWorld * 2);
        for (const Result& r : results) {
          CHECK(worst_difference(r.parameters, t.w) < 1e-6);
          CHECK(r.parameters == results[0].parameters);
          for (int step = 0; step < kSteps; ++step) {
            const StepScale& s = r.scales[static_cast<std::size_t>(step)];
            CHECK(s.norm == Approx(t.norms[static_cast<std::size_t>(step)]).epsilon(1e-6));
            CHECK(s.norm > 1);  // so that clipping is at work
            CHECK(s.finite == 1);
          }
        }
      }
}

TEST_CASE("norm and clipping are a federation group's own") {
  const auto initial = initial_parameters();
  Case c = make_case(Mesh(2, 1, 3));
  const auto results = train(c);
  CHECK(results[0].scales[0].norm == results[2].scales[0].norm);
  CHECK(results[0].scales[0].norm != results[3].scales[0].norm);
}

TEST_CASE("an infinite gradient on one rank leaves the weights of its whole group untouched") {
  // The last shard of replica 0: the others learn of it through the norm.
  const Case clean = make_case(Mesh(1, 2, 3));
  Case poisoned = clean;
  poisoned.poisoned_step = kSteps;
  poisoned.poisoned_rank = 2;
  Case shorter = clean;
  shorter.steps = kSteps - 1;
  const auto results = train(poisoned), expected = train(shorter);
  for (std::size_t p = 0; p < results.size(); ++p) {
    CHECK(results[p].scales[kSteps - 1].finite == 0);
    CHECK(results[p].scales[kSteps - 2].finite == 1);
    CHECK(results[p].parameters == expected[p].parameters);
  }
  CHECK(train(clean)[0].parameters != expected[0].parameters);
}

TEST_CASE("stochastic rounding of fp32 parameters is refused") {
  std::string message;
  run_ranks(1, [&](World& world) {
    ToyRank rank(world, Mesh(1, 1, 1), make_units(1, false), {}, {});
    OptimizerOptions o;
    o.stochastic_rounding = true;
    try {
      Optimizer optimizer(*rank.engine, rank.groups, *rank.device, *rank.ops, rank.compute, o);
    } catch (const UsageError& e) {
      message = e.what();
    }
  });
  CHECK_THAT(message, Catch::Matchers::Contains("precision to bf16_pure"));
}

TEST_CASE("stochastic rounding draws the same bits on every mesh") {
  // Every rank's gradient is rounded to bf16 and the six are added with one rounding, whatever the mesh.
  Case c = make_case(Mesh(1, 6, 1));
  c.micro_steps = 1;
  c.engine.precision = Precision::from("bf16_pure", "bf16");
  c.optimizer.stochastic_rounding = true;
  c.optimizer.clip = 0;
  const auto replicated = train(c);
  c.mesh = Mesh(1, 1, 6);
  CHECK(train(c)[0].parameters == replicated[0].parameters);
  c.optimizer.seed = 43;
  CHECK(train(c)[0].parameters != replicated[0].parameters);
}
