#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/federated_toy.h"

using namespace strata;

namespace {

using Model = std::vector<std::vector<double>>;  // by unit

FederatedCase make_case(const Mesh& mesh, OuterRule rule = OuterRule::fedavg, double eta = 1,
                        double momentum = 0) {
  FederatedCase c;
  c.mesh = mesh;
  c.federation.rule = rule;
  c.federation.eta = eta;
  c.federation.momentum = momentum;
  c.federation.every = 3;
  c.federation.last_step = c.steps;
  return c;
}

FederatedCase streaming_case(const Mesh& mesh) {
  FederatedCase c = make_case(mesh, OuterRule::diloco, 0.4, 0.9);
  c.steps = c.federation.last_step = 14;
  c.federation.every = 6;
  c.federation.schedule = FederationSchedule::streaming;
  c.federation.fragment_layers = 1;
  c.federation.alpha = 0.5;
  c.federation.tau = 2;
  return c;
}

Model initial_model() {
  FederatedCase c = make_case(Mesh(1, 1, 1));
  c.steps = 0;
  const auto parameters = train_federated(c)[0].parameters;
  Model model;
  for (const auto& unit : parameters) model.emplace_back(unit.begin(), unit.end());
  return model;
}

// Groups in double precision, and the outer rules as the literature writes them.
class Twin {
 public:
  Twin(const FederatedCase& c, const Model& initial)
      : c_(c),
        groups_(static_cast<std::size_t>(c.mesh.federate()), initial),
        old_(initial),
        momentum_(initial) {
    if (c.federation.rule != OuterRule::fedmom)
      for (auto& unit : momentum_) std::fill(unit.begin(), unit.end(), 0.0);
  }

  void inner_step(int step) {
    step_ = step;
    const int size = c_.mesh.replicate() * c_.mesh.shard();
    for (int f = 0; f < c_.mesh.federate(); ++f)
      for (std::size_t u = 0; u < old_.size(); ++u)
        for (std::size_t i = 0; i < old_[u].size(); ++i) {
          double& w = groups_[static_cast<std::size_t>(f)][u][i];
          double sum = 0;
          for (int r = 0; r < size; ++r)
            sum += ToyRank::slope(f * size + r, static_cast<int>(u), static_cast<std::int64_t>(i)) +
                   ToyRank::kCurvature * w;
          w -= kRate * sum / static_cast<double>(toy_tokens(f, step) * size);
        }
  }

  // Tokens of a group since the unit was sent last.
  double tokens_since(int group, int sent) const {
    double tokens = 0;
    for (int step = sent + 1; step <= step_; ++step) tokens += static_cast<double>(toy_tokens(group, step));
    return tokens;
  }

  std::vector<double> mean_delta(std::size_t u) {
    const int sent = std::exchange(sent_[u], step_);
    std::vector<double> delta(old_[u].size(), 0.0);
    double total = 0;
    for (std::size_t f = 0; f < groups_.size(); ++f) {
      const double w = c_.federation.token_weights ? tokens_since(static_cast<int>(f), sent) : 1.0;
      total += w;
      for (std::size_t i = 0; i < delta.size(); ++i) delta[i] += w * (old_[u][i] - groups_[f][u][i]);
    }
    for (double& d : delta) d /= total;
    return delta;
  }

  void outer_step(std::size_t u, const std::vector<double>& delta, double alpha) {
    const double eta = c_.federation.eta, mu = c_.federation.momentum;
    for (std::size_t i = 0; i < delta.size(); ++i) {
      double &old = old_[u][i], &m = momentum_[u][i], theta = 0;
      switch (c_.federation.rule) {
        case OuterRule::fedavg:
          theta = old - eta * delta[i];
          break;
        case OuterRule::fedavgm:
          m = mu * m + delta[i];
          theta = old - eta * m;
          break;
        case OuterRule::fedmom: {
          const double v = old - eta * delta[i];
          theta = v + mu * (v - m);
          m = v;
          break;
        }
        case OuterRule::diloco:
          m = mu * m + delta[i];
          theta = old - eta * (delta[i] + mu * m);
          break;
      }
      old = theta;
      for (auto& group : groups_) group[u][i] = alpha * group[u][i] + (1 - alpha) * theta;
    }
  }

  std::vector<Model> run() {
    for (int step = 1; step <= c_.steps; ++step) {
      inner_step(step);
      if (step % c_.federation.every != 0 && step != c_.steps) continue;
      for (std::size_t u = 0; u < old_.size(); ++u) outer_step(u, mean_delta(u), 0);
    }
    return groups_;
  }

  // The streaming case above, written out: fragment p = {decoder p}, embedding with the first, head with the
  // last; sent after steps 2, 4, 6 of every 6, applied 2 steps later.
  std::vector<Model> run_streaming() {
    const std::vector<std::vector<std::size_t>> fragments{{0, 1}, {2}, {3, 4}};
    std::map<std::size_t, std::pair<int, std::vector<double>>> in_flight;  // by unit: step of arrival, delta
    for (int step = 1; step <= c_.steps; ++step) {
      inner_step(step);
      const bool last = step == c_.steps;
      for (auto it = in_flight.begin(); it != in_flight.end();) {
        if (!last && it->second.first != step) {
          ++it;
          continue;
        }
        outer_step(it->first, it->second.second, c_.federation.alpha);
        it = in_flight.erase(it);
      }
      for (std::size_t p = 0; p < 3; ++p)
        for (const std::size_t u : fragments[p]) {
          if (last)
            outer_step(u, mean_delta(u), 0);
          else if (step % 6 == static_cast<int>(p + 1) * 2 % 6)
            in_flight[u] = {step + 2, mean_delta(u)};
        }
    }
    return groups_;
  }

 private:
  FederatedCase c_;
  std::vector<Model> groups_;
  Model old_, momentum_;
  int step_ = 0;
  std::map<std::size_t, int> sent_;  // by unit: the step after which it was sent last
};

double worst_difference(const std::vector<std::vector<float>>& a, const Model& b) {
  double worst = 0;
  for (std::size_t u = 0; u < b.size(); ++u)
    for (std::size_t i = 0; i < b[u].size(); ++i) worst = std::max(worst, std::abs(a[u][i] - b[u][i]));
  return worst;
}
double worst_difference(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  Model wide;
  for (const auto& unit : b) wide.emplace_back(unit.begin(), unit.end());
  return worst_difference(a, wide);
}

// Compares every rank with its group's twin; the largest weight is 1.
void check_against(const FederatedCase& c, const std::vector<Model>& groups, double tolerance) {
  const auto results = train_federated(c);
  for (int p = 0; p < c.mesh.size(); ++p) {
    CAPTURE(p);
    CHECK(worst_difference(results[static_cast<std::size_t>(p)].parameters,
                           groups[static_cast<std::size_t>(c.mesh.coordinates(p).federate)]) < tolerance);
  }
}

struct Rule {
  OuterRule rule;
  double eta, momentum;
};
const std::vector<Rule> kRules{{OuterRule::fedavg, 1, 0},
                               {OuterRule::fedavg, 0.5, 0},
                               {OuterRule::fedavgm, 1, 0.9},
                               {OuterRule::fedmom, 0.7, 0.9},
                               {OuterRule::diloco, 0.7, 0.9}};

void require_equal_bytes(const ByteCounters& counted, const ByteCounters& planned) {
  for (const Traffic t : {Traffic::training, Traffic::edge})
    for (std::size_t k = 0; k < counted.entries[0].size(); ++k) {
      const auto collective = static_cast<Collective>(k);
      CAPTURE(static_cast<int>(t), name_of(collective));
      REQUIRE(counted.at(t, collective).received == planned.at(t, collective).received);
      REQUIRE(counted.at(t, collective).calls == planned.at(t, collective).calls);
    }
}

void check_plans(const FederatedCase& c) {
  const auto results = train_federated(c);
  const auto units = make_units(3, false);
  EngineOptions engine = c.engine;
  engine.moments = false;
  const auto outer = federation_memory(units, c.mesh, engine.precision, c.federation);
  for (int p = 0; p < c.mesh.size(); ++p) {
    CAPTURE(p, c.mesh.describe());
    BytePlan plan;
    for (int step = 1; step <= c.steps; ++step) {
      plan += plan_step_bytes(units, c.mesh, p, engine);
      plan += plan_federation_bytes(units, c.mesh, p, engine.precision, c.federation, step);
    }
    const auto& mine = results[static_cast<std::size_t>(p)];
    require_equal_bytes(mine.shard, plan.shard);
    require_equal_bytes(mine.replicate, plan.replicate);
    require_equal_bytes(mine.federate, plan.federate);
    const auto o = static_cast<std::size_t>(Purpose::outer);
    REQUIRE(mine.memory.current[o] == outer[o]);
  }
}

}  // namespace

TEST_CASE("every rule and both weightings equal a double-precision twin on disjoint data") {
  const Model initial = initial_model();
  for (const Mesh& mesh : {Mesh(2, 1, 1), Mesh(3, 1, 2), Mesh(2, 2, 2), Mesh(4, 2, 1), Mesh(1, 1, 2)})
    for (const Rule& rule : kRules)
      for (const bool tokens : {false, true}) {
        FederatedCase c = make_case(mesh, rule.rule, rule.eta, rule.momentum);
        c.federation.token_weights = tokens;
        CAPTURE(mesh.describe(), static_cast<int>(rule.rule), rule.eta, tokens);
        check_against(c, Twin(c, initial).run(), 1e-6);
      }
}

TEST_CASE("the last step aggregates even when the round is not full, and once only when it is") {
  FederatedCase c = make_case(Mesh(2, 1, 1));
  c.steps = 8;
  c.federation.last_step = 8;
  CHECK(train_federated(c)[0].aggregated ==
        std::vector<bool>{false, false, true, false, false, true, false, true});
  check_against(c, Twin(c, initial_model()).run(), 1e-6);
  c.steps = c.federation.last_step = 6;
  const auto results = train_federated(c);
  CHECK(results[0].federate.at(Traffic::training, Collective::all_reduce).calls == 2 * 3);
  CHECK(results[0].parameters == results[1].parameters);
}

TEST_CASE("overlap equals blocking bit for bit in every order of streams") {
  for (const Rule& rule : {kRules[0], kRules[4]}) {
    FederatedCase c = make_case(Mesh(2, 2, 2), rule.rule, rule.eta, rule.momentum);
    c.federation.one_replica = true;
    const auto blocking = train_federated(c);
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      c.seed = seed;
      c.eager = seed % 5 == 0;
      for (const auto schedule : {FederationSchedule::blocking, FederationSchedule::overlap}) {
        c.federation.schedule = schedule;
        const auto other = train_federated(c);
        CAPTURE(seed, static_cast<int>(schedule));
        for (std::size_t p = 0; p < other.size(); ++p) REQUIRE(other[p].parameters == blocking[p].parameters);
      }
    }
  }
}

TEST_CASE("one replica that aggregates and broadcasts equals all replicas aggregating") {
  for (const DType wire : {DType::f32, DType::bf16, DType::i8})
    for (const auto schedule : {FederationSchedule::blocking, FederationSchedule::streaming})
      for (const Rule& rule : {kRules[0], kRules[4]}) {
        FederatedCase c = schedule == FederationSchedule::streaming ? streaming_case(Mesh(2, 2, 2))
                                                                    : make_case(Mesh(2, 2, 2));
        c.federation.rule = rule.rule;
        c.federation.eta = rule.eta;
        c.federation.momentum = rule.momentum;
        c.federation.wire = wire;
        const auto all = train_federated(c);
        c.federation.one_replica = true;
        const auto one = train_federated(c);
        CAPTURE(name_of(wire), static_cast<int>(schedule), static_cast<int>(rule.rule));
        for (std::size_t p = 0; p < all.size(); ++p) CHECK(one[p].parameters == all[p].parameters);
      }
}

TEST_CASE("groups fed identical data equal one group bit for bit") {
  for (const int groups : {2, 3, 4}) {
    FederatedCase c = make_case(Mesh(groups, 1, 2));
    c.identical_data = true;
    const auto many = train_federated(c);
    c.mesh = Mesh(1, 1, 2);
    const auto one = train_federated(c);
    CHECK(many.back().parameters == one[0].parameters);
  }
}

TEST_CASE("one group with eta 1 and no momentum equals no federation, for every rule") {
  FederatedCase c = make_case(Mesh(1, 2, 1));
  c.federation.every = 1000;
  c.federation.last_step = 0;
  const auto without = train_federated(c);
  for (const OuterRule rule : {OuterRule::fedavg, OuterRule::fedavgm, OuterRule::fedmom, OuterRule::diloco})
    CHECK(train_federated(make_case(Mesh(1, 2, 1), rule, 1, 0))[0].parameters == without[0].parameters);
}

TEST_CASE("without momentum and with eta 1 every rule is FedAvg within one ulp of the largest weight") {
  const auto fedavg = train_federated(make_case(Mesh(3, 1, 2)));
  for (const OuterRule rule : {OuterRule::fedavgm, OuterRule::fedmom, OuterRule::diloco}) {
    const auto other = train_federated(make_case(Mesh(3, 1, 2), rule, 1, 0));
    CHECK(worst_difference(other[0].parameters, fedavg[0].parameters) <= 0x1p-23);
  }
}

TEST_CASE("aggregation after every step of inner SGD equals data parallelism") {
  FederatedCase c = make_case(Mesh(2, 1, 1));
  c.federation.every = 1;
  c.identical_data = false;
  // Groups hold different token counts: weighted by them, the mean of the groups' steps is the step of the
  // mean.
  c.federation.token_weights = true;
  const Model initial = initial_model();
  Model expected = initial;
  for (int step = 1; step <= c.steps; ++step)
    for (std::size_t u = 0; u < expected.size(); ++u)
      for (std::size_t i = 0; i < expected[u].size(); ++i) {
        double sum = 0, tokens = 0;
        for (int r = 0; r < 2; ++r) {
          sum += ToyRank::slope(r, static_cast<int>(u), static_cast<std::int64_t>(i)) +
                 ToyRank::kCurvature * expected[u][i];
          tokens += static_cast<double>(toy_tokens(r, step));
        }
        expected[u][i] -= kRate * sum / tokens;
      }
  check_against(c, {expected, expected}, 1e-6);
}

TEST_CASE("streaming equals a double-precision twin, and all groups end with the same model") {
  const Model initial = initial_model();
  for (const Mesh& mesh : {Mesh(2, 1, 1), Mesh(3, 1, 2), Mesh(2, 2, 2)})
    for (const bool tokens : {false, true}) {
      FederatedCase c = streaming_case(mesh);
      c.federation.token_weights = tokens;
      CAPTURE(mesh.describe(), tokens);
      check_against(c, Twin(c, initial).run_streaming(), 1e-6);
      const auto results = train_federated(c);
      for (const auto& r : results) CHECK(r.parameters == results[0].parameters);
    }
}

TEST_CASE("streaming does not depend on the order of streams") {
  for (const Mesh& mesh : {Mesh(1, 1, 1), Mesh(2, 1, 1), Mesh(1, 1, 2), Mesh(2, 2, 2)})
    for (const DType wire : {DType::f32, DType::i8}) {
      FederatedCase c = streaming_case(mesh);
      c.federation.wire = wire;
      c.federation.one_replica = c.federation.token_weights = true;
      const auto first = train_federated(c);
      const std::uint64_t seeds =
          mesh.size() == 1 ? 100 : 15;  // alone, no peer keeps a stream from running ahead
      for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        c.seed = seed;
        c.eager = seed % 5 == 0;
        CAPTURE(seed, mesh.describe(), name_of(wire));
        const auto other = train_federated(c);
        for (std::size_t p = 0; p < other.size(); ++p) REQUIRE((other[p].parameters == first[p].parameters));
      }
    }
}

TEST_CASE("resuming in the middle of a round, fragments in flight included, changes nothing") {
  for (const bool tokens : {false, true})
    for (const DType wire : {DType::f32, DType::i8})
      for (const int at : {1, 3, 4, 7, 13}) {
        FederatedCase c = streaming_case(Mesh(2, 2, 1));
        c.federation.token_weights = tokens;
        c.federation.one_replica = true;
        c.federation.wire = wire;
        const auto whole = train_federated(c);
        c.resume_at = at;
        const auto resumed = train_federated(c);
        CAPTURE(at, tokens, name_of(wire));
        for (std::size_t p = 0; p < whole.size(); ++p) CHECK(resumed[p].parameters == whole[p].parameters);
        FederatedCase overlap = make_case(Mesh(2, 1, 2), OuterRule::fedmom, 0.7, 0.9);
        overlap.federation.schedule = FederationSchedule::overlap;
        const auto steady = train_federated(overlap);
        overlap.resume_at = std::min(at, 9);
        CHECK(train_federated(overlap)[0].parameters == steady[0].parameters);
      }
}

TEST_CASE("narrow wires stay near the fp32 result, and int8 carries its error forward") {
  const Model initial = initial_model();
  for (const DType wire : {DType::bf16, DType::i8}) {
    FederatedCase c = make_case(Mesh(2, 1, 2), OuterRule::diloco, 0.7, 0.9);
    const auto exact = train_federated(c);
    c.federation.wire = wire;
    const auto narrow = train_federated(c);
    const double moved = worst_difference(exact[0].parameters, initial);
    const double off = worst_difference(narrow[0].parameters, exact[0].parameters);
    CAPTURE(name_of(wire), moved, off);
    CHECK(off > 0);
    CHECK(off < 0.02 * moved);
    CHECK(narrow[0].parameters == narrow[2].parameters);
  }
}

TEST_CASE("in bf16_pure FedAvg averages the bf16 parameters as they are") {
  FederatedCase c = make_case(Mesh(2, 1, 2));
  c.engine.precision = Precision::from("bf16_pure", "bf16");
  const auto averaged = train_federated(c);
  CHECK(averaged[0].parameters == averaged[2].parameters);
  CHECK(averaged[0].memory.current[static_cast<std::size_t>(Purpose::outer)] == 0);

  c.steps = 3;  // one round
  FederatedCase apart = c;
  apart.federation.every = 1000;
  apart.federation.last_step = 0;
  const auto local = train_federated(apart), mean = train_federated(c);
  for (std::size_t u = 0; u < 5; ++u)
    for (std::size_t i = 0; i < mean[0].parameters[u].size(); ++i) {
      const float m = 0.5f * (local[0].parameters[u][i] + local[2].parameters[u][i]);
      REQUIRE(mean[0].parameters[u][i] == to_float(to_bf16(m)));
    }
}

TEST_CASE("outer state on the host gives the same bits") {
  for (const DType wire : {DType::f32, DType::i8}) {
    FederatedCase c = streaming_case(Mesh(2, 1, 2));
    c.federation.wire = wire;
    const auto device = train_federated(c);
    c.federation.offload = true;
    CHECK(train_federated(c)[1].parameters == device[1].parameters);
  }
}

TEST_CASE("bytes and memory of aggregation follow the plan for every strategy") {
  for (const Mesh& mesh : {Mesh(1, 1, 1), Mesh(1, 2, 1), Mesh(1, 1, 3), Mesh(1, 2, 3), Mesh(3, 1, 1),
                           Mesh(2, 1, 3), Mesh(3, 2, 2)})
    for (const bool one : {false, true})
      for (const DType wire : {DType::f32, DType::bf16, DType::i8}) {
        FederatedCase c = make_case(mesh);
        c.steps = c.federation.last_step = 7;
        c.federation.one_replica = one;
        c.federation.wire = wire;
        check_plans(c);
        c.federation.rule = OuterRule::diloco;
        c.federation.momentum = 0.9;
        c.federation.token_weights = true;
        c.federation.offload = one;
        c.federation.schedule = FederationSchedule::overlap;
        check_plans(c);
        FederatedCase s = streaming_case(mesh);
        s.federation.one_replica = one;
        s.federation.wire = wire;
        check_plans(s);
      }
}
