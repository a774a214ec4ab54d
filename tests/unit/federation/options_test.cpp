#include "federation/options.h"

#include "base/error.h"
#include "federation/fragments.h"
#include "tests/support/catch.h"
#include "tests/support/units.h"

using namespace strata;

namespace {

std::string refusal(const std::function<void(Config&)>& change) {
  Config config;
  change(config);
  try {
    (void)FederationOptions::from(config);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("defaults follow the rule and the schedule") {
  Config config;
  CHECK(FederationOptions::from(config).eta == 1);
  CHECK(FederationOptions::from(config).momentum == 0);
  config.federation.rule = "diloco";
  CHECK(FederationOptions::from(config).eta == 0.7);
  CHECK(FederationOptions::from(config).momentum == 0.9);
  CHECK(FederationOptions::from(config).alpha == 0);
  config.federation.schedule = "streaming";
  CHECK(FederationOptions::from(config).eta == 0.4);
  CHECK(FederationOptions::from(config).alpha == 0.5);
  config.federation.rule = "fedavgm";
  CHECK(FederationOptions::from(config).eta == 1);
  config.federation.eta = 0.25;
  CHECK(FederationOptions::from(config).eta == 0.25);
}

TEST_CASE("federation values that cannot be used are refused by their key") {
  using Catch::Matchers::Contains;
  CHECK_THAT(refusal([](Config& c) { c.federation.rule = "fedprox"; }),
             Contains("federation.rule is \"fedprox\", allowed are fedavg, fedavgm, fedmom, diloco"));
  CHECK_THAT(refusal([](Config& c) { c.federation.dtype = "int4"; }), Contains("fp32, bf16, int8"));
  CHECK_THAT(refusal([](Config& c) { c.federation.every = 0; }), Contains("federation.every is 0"));
  CHECK_THAT(refusal([](Config& c) { c.federation.momentum = 0.9; }), Contains("is 0 with fedavg"));
  CHECK_THAT(refusal([](Config& c) { c.federation.eta = 0.0; }), Contains("federation.eta"));
  CHECK_THAT(refusal([](Config& c) { c.federation.alpha = 0.5; }),
             Contains("unless federation.schedule is streaming"));
  CHECK_THAT(refusal([](Config& c) { c.federation.schedule = "streaming", c.federation.tau = 9; }),
             Contains("federation.tau is 9"));
}

TEST_CASE("fragments deal out the layers in strides, and each is sent once in every round") {
  FederationOptions options;
  options.schedule = FederationSchedule::streaming;
  options.every = 30;
  options.fragment_layers = 3;
  options.tau = 5;
  options.last_step = 100;
  const Fragments fragments(make_units(8, false), options);
  REQUIRE(fragments.count() == 3);
  CHECK(fragments.units(0) == std::vector<int>{0, 1, 4, 7});
  CHECK(fragments.units(1) == std::vector<int>{2, 5, 8});
  CHECK(fragments.units(2) == std::vector<int>{3, 6, 9});
  for (int p = 0; p < 3; ++p) {
    for (std::int64_t round = 0; round < 3; ++round) {
      int sent = 0;
      for (std::int64_t step = round * 30 + 1; step <= round * 30 + 30; ++step)
        sent += fragments.sent(p, step) ? 1 : 0;
      CHECK(sent == 1);
    }
    CHECK(fragments.sent(p, (p + 1) * 10));
    CHECK(fragments.applied(p, (p + 1) * 10 + 5));
    CHECK(fragments.in_flight(p, (p + 1) * 10 + 4));
    CHECK_FALSE(fragments.in_flight(p, (p + 1) * 10 + 5));
    CHECK(fragments.sent(p, 100));
    CHECK_FALSE(fragments.in_flight(p, 100));
  }
}
