#include "optim/schedule.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tests/support/catch.h"

using namespace strata;

namespace {

ScheduleConfig schedule(const char* kind, std::int64_t steps, std::int64_t warmup) {
  ScheduleConfig s;
  s.kind = kind;
  s.steps = steps;
  s.warmup_steps = warmup;
  return s;
}

}  // namespace

TEST_CASE("the paper's schedule gives the paper's learning rates") {
  auto s = schedule("cosine", 64, 6);
  s.warmup_from_zero = true;
  // Published for steps counted from 0.
  CHECK(learning_rate(s, 3e-4, 1) == 0);
  CHECK(learning_rate(s, 3e-4, 2) == Approx(5e-5));
  CHECK(learning_rate(s, 3e-4, 6) == Approx(2.5e-4));
  CHECK(learning_rate(s, 3e-4, 7) == Approx(3e-4));
  CHECK(learning_rate(s, 3e-4, 36) == Approx(1.5e-4));
  CHECK(learning_rate(s, 3e-4, 64) == Approx(2.2e-7).epsilon(0.01));
}

TEST_CASE("warm-up starts above zero and every decay reaches its floor exactly at the last step") {
  for (const char* kind : {"cosine", "linear", "wsd"}) {
    auto s = schedule(kind, 50, 7);
    s.decay_steps = 20;
    s.min_lr = 1e-5;
    CAPTURE(kind);
    CHECK(learning_rate(s, 7e-4, 1) == Approx(1e-4));
    CHECK(learning_rate(s, 7e-4, 7) == 7e-4);
    CHECK(learning_rate(s, 7e-4, 49) > 1e-5);
    CHECK(learning_rate(s, 7e-4, 50) == 1e-5);
  }
  CHECK(learning_rate(schedule("constant", 50, 0), 7e-4, 1) == 7e-4);
  CHECK_THROWS_AS(learning_rate(schedule("cosin", 50, 0), 7e-4, 1), UsageError);
}

TEST_CASE("wsd stays at the peak until its decay begins") {
  auto s = schedule("wsd", 100, 10);
  s.decay_steps = 25;
  for (std::int64_t step = 10; step <= 75; ++step) CHECK(learning_rate(s, 1e-3, step) == 1e-3);
  CHECK(learning_rate(s, 1e-3, 80) == Approx(0.8e-3));
}

TEST_CASE("schedules equal Hugging Face's, whose steps count from 0") {
  std::ifstream file(STRATA_SOURCE_DIR "/tests/golden/schedule.json");
  REQUIRE(file);
  int compared = 0;
  for (const auto& golden : nlohmann::json::parse(file)) {
    const auto& arguments = golden["arguments"];
    const std::string kind = golden["kind"];
    auto s = schedule(kind == "cosine_min_lr" ? "cosine" : kind.c_str(), golden["steps"],
                      arguments.value("num_warmup_steps", 0));
    const double peak = golden["peak_lr"];
    if (kind == "wsd") {
      if (arguments["decay_type"] != "linear") continue;  // ours decays linearly
      s.decay_steps = arguments["num_decay_steps"];
      s.min_lr = peak * arguments.value("min_lr_ratio", 0.0);
    }
    if (kind == "cosine_min_lr") s.min_lr = arguments["min_lr"];
    const auto& rates = golden["lr"];
    for (std::int64_t step = 1; step <= s.steps; ++step) {
      CAPTURE(golden["function"], step);
      // Hugging Face's wsd warms up from min_lr, ours (as its other schedules) from 0.
      if (s.min_lr > 0 && kind == "wsd" && step <= s.warmup_steps) continue;
      s.warmup_from_zero = false;
      CHECK(std::abs(learning_rate(s, peak, step) - rates[static_cast<std::size_t>(step)].get<double>()) <
            1e-15);
      s.warmup_from_zero = true;
      CHECK(std::abs(learning_rate(s, peak, step) - rates[static_cast<std::size_t>(step - 1)].get<double>()) <
            1e-15);
    }
    ++compared;
  }
  CHECK(compared == 8);
}
