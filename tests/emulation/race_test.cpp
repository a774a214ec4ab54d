// Needs kernels compiled in mode `race`.
#include "cuda/emulation/options.h"
#include "tests/emulation/kernels.h"
#include "tests/support/catch.h"

using namespace strata;
using emulation::Options;
using emulation::Order;

namespace {

std::vector<Options> schedules() {
  std::vector<Options> all;
  for (const auto copies : {emulation::CopyTime::at_issue, emulation::CopyTime::at_wait}) {
    for (const std::uint64_t seed : {0, 1, 2, 3, 4}) {
      Options options;
      options.threads = seed == 0 ? Order::forward : seed == 1 ? Order::reverse : Order::random;
      options.blocks = options.threads;
      options.seed = seed;
      options.copies = copies;
      all.push_back(options);
    }
  }
  return all;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a race or an overrun is reported with its lines in every schedule") {
  for (const test::RaceCase& planted : test::race_cases()) {
    if (planted.correct) continue;
    for (const Options& options : schedules()) {
      const emulation::ScopedOptions scope(options);
      std::string report;
      try {
        planted.run();
      } catch (const emulation::Misuse& misuse) {
        report = misuse.what();
      } catch (const std::exception&) {
        // a wrong number alone is not a report
      }
      INFO(planted.name << ", seed " << options.seed << ": " << report);
      CHECK(has(report, planted.out_of_bounds ? "out of bounds: " : "race on "));
      CHECK(has(report, test::place_of("races.cu", "newer:" + planted.name)));
      if (!planted.out_of_bounds && planted.name != "pipeline") {
        CHECK(has(report, test::place_of("races.cu", "older:" + planted.name)));
      }
      CHECK(has(report, "thread ("));
      CHECK(has(report, "launched at tests/emulation/races.cu:"));
    }
  }
}

TEST_CASE("correct kernels give no report in any schedule") {
  for (const test::RaceCase& good : test::race_cases()) {
    if (!good.correct) continue;
    for (const Options& options : schedules()) {
      const emulation::ScopedOptions scope(options);
      INFO(good.name << ", seed " << options.seed);
      CHECK_NOTHROW(good.run());
    }
  }
}

TEST_CASE("two launches do not race with each other") {
  for (int i = 0; i < 3; ++i) {
    for (const test::RaceCase& good : test::race_cases()) {
      if (good.name == "count" && good.correct) CHECK_NOTHROW(good.run());
    }
  }
}

TEST_CASE("the detector can be switched off") {
  Options options;
  options.race_detector = false;
  const emulation::ScopedOptions scope(options);
  for (const test::RaceCase& planted : test::race_cases()) {
    if (planted.name == "count") CHECK_NOTHROW(planted.run());
  }
}
