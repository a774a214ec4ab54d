#include "federation/options.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "base/error.h"

namespace strata {
namespace {

template <class Value, std::size_t N>
Value choose(const char* key, const std::string& given,
             const std::array<std::pair<const char*, Value>, N>& allowed) {
  std::string names;
  for (const auto& [name, value] : allowed) {
    if (given == name) return value;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  throw UsageError(fmt::format("{} is \"{}\", allowed are {} -> choose one", key, given, names));
}

void require(bool good, const char* key, double value, const char* allowed, const char* advice) {
  if (!good) throw UsageError(fmt::format("{} is {}, allowed {} -> {}", key, value, allowed, advice));
}

}  // namespace

FederationOptions FederationOptions::from(const Config& config) {
  const FederationConfig& c = config.federation;
  FederationOptions o;
  o.every = c.every;
  o.last_step = config.schedule.steps;
  o.rule = choose<OuterRule, 4>("federation.rule", c.rule,
                                {{{"fedavg", OuterRule::fedavg},
                                  {"fedavgm", OuterRule::fedavgm},
                                  {"fedmom", OuterRule::fedmom},
                                  {"diloco", OuterRule::diloco}}});
  o.schedule = choose<FederationSchedule, 3>("federation.schedule", c.schedule,
                                             {{{"blocking", FederationSchedule::blocking},
                                               {"overlap", FederationSchedule::overlap},
                                               {"streaming", FederationSchedule::streaming}}});
  o.one_replica = choose<bool, 2>("federation.replicas", c.replicas, {{{"all", false}, {"one", true}}});
  o.token_weights = choose<bool, 2>("federation.weights", c.weights, {{{"equal", false}, {"tokens", true}}});
  o.wire = choose<DType, 3>("federation.dtype", c.dtype,
                            {{{"fp32", DType::f32}, {"bf16", DType::bf16}, {"int8", DType::i8}}});

  const bool streaming = o.schedule == FederationSchedule::streaming;
  const bool averages = o.rule == OuterRule::fedavg || o.rule == OuterRule::fedavgm;
  o.eta = c.eta.value_or(averages ? 1.0 : streaming ? 0.4 : 0.7);
  o.momentum = c.momentum.value_or(o.rule == OuterRule::fedavg ? 0.0 : 0.9);
  o.alpha = c.alpha.value_or(streaming ? 0.5 : 0.0);
  o.tau = c.tau;
  o.fragment_layers = c.fragment_layers;
  o.offload = c.offload;
  o.reduce.rounding = config.reduce_rounding == "hop" ? ReduceRounding::hop : ReduceRounding::once;
  o.reduce.imitate_hops = config.reduce_imitate_hops;

  const auto as_double = [](std::int64_t v) { return static_cast<double>(v); };
  require(o.every >= 1, "federation.every", as_double(o.every), "are numbers from 1",
          "give the steps between two aggregations");
  require(o.eta > 0 && o.eta <= 10, "federation.eta", o.eta, "are values above 0 and up to 10",
          "leave it out for the rule's own");
  require(o.momentum >= 0 && o.momentum < 1, "federation.momentum", o.momentum,
          "are values from 0 to below 1", "leave it out for the rule's own");
  require(o.rule != OuterRule::fedavg || o.momentum == 0, "federation.momentum", o.momentum,
          "is 0 with fedavg", "leave it out, or set federation.rule to fedavgm, fedmom or diloco");
  require(streaming ? o.alpha >= 0 && o.alpha < 1 : o.alpha == 0, "federation.alpha", o.alpha,
          streaming ? "are values from 0 to below 1" : "is 0 unless federation.schedule is streaming",
          "leave it out for the schedule's own");
  if (streaming) {
    require(o.tau >= 0 && o.tau <= o.every, "federation.tau", as_double(o.tau),
            "are steps from 0 to federation.every, so that a fragment arrives before it is sent again",
            "choose a smaller delay");
    require(o.fragment_layers >= 1, "federation.fragment_layers", as_double(o.fragment_layers),
            "are numbers from 1", "give the layers of a fragment");
  }
  return o;
}

}  // namespace strata
