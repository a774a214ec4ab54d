// What the loop makes of the world's reports, and the file it keeps.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/error.h"
#include "tests/support/catch.h"
#include "train/control.h"
#include "train/metrics.h"
#include "train/status.h"

using namespace strata;

namespace {

RankReport report(double loss_sum, double tokens, float norm, bool finite = true, bool stop = false) {
  RankReport r;
  r.loss_sum = loss_sum, r.tokens = tokens;
  r.scale.norm = norm, r.scale.finite = finite ? 1 : 0;
  r.stop = stop ? 1 : 0;
  return r;
}

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

struct File {
  std::string path = "strata_test_metrics.jsonl";
  File() { std::filesystem::remove(path); }
  ~File() { std::filesystem::remove(path); }
};

TrainRecord record(std::int64_t step) {
  TrainRecord r;
  r.step = step, r.loss = 1;
  return r;
}

}  // namespace

TEST_CASE("the world's loss weighs tokens, the rank mean of perplexity weighs ranks") {
  const WorldStep step = summarize({report(30, 10, 2), report(5, 5, 2), report(24, 6, 8), report(14, 7, 8)});
  CHECK(step.loss == Approx(73.0 / 28));
  CHECK(step.tokens == 28);
  CHECK(step.perplexity_rank_mean == Approx((std::exp(3) + std::exp(1) + std::exp(4) + std::exp(2)) / 4));
  CHECK(step.grad_norm_mean == 5);
  CHECK(step.grad_norm_max == 8);
  CHECK(step.non_finite_ranks.empty());
  CHECK_FALSE(step.stop_requested);
}

TEST_CASE("a rank whose every target is masked has no perplexity to enter the mean") {
  const WorldStep step = summarize({report(30, 10, 2), report(0, 0, 2)});
  CHECK(step.loss == Approx(3));
  CHECK(step.perplexity_rank_mean == Approx(std::exp(3)));
  CHECK(summarize({report(0, 0, 0), report(0, 0, 0)}).tokens == 0);
}

TEST_CASE("one rank's signal stops the world, and one rank's number ends it") {
  CHECK(summarize({report(1, 1, 1), report(1, 1, 1, true, true)}).stop_requested);
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(summarize({report(1, 1, 1), report(1, 1, 1, false)}).non_finite_ranks == std::vector<int>{1});
  CHECK(summarize({report(infinity, 1, 1), report(std::nan(""), 1, 1)}).non_finite_ranks ==
        std::vector<int>{0, 1});
}

TEST_CASE("a rank without a target counts as nothing") {
  const WorldStep step = summarize({report(0, 0, 1), report(8, 4, 1)});
  CHECK(step.loss == 2);
  CHECK(std::isfinite(step.perplexity_rank_mean));
}

TEST_CASE("metrics after a step that is done again are dropped, and so is a torn line") {
  const File file;
  {
    MetricsWriter writer(file.path, 0);
    for (std::int64_t step = 1; step <= 4; ++step) writer.write(record(step));
    writer.write(ValidationRecord{4, 1, {}, 1, 1});
  }
  const std::string all = text_of(file.path);
  std::ofstream(file.path, std::ios::app) << R"({"step":2,"split":"tr)";
  { MetricsWriter writer(file.path, 2); }
  const std::string kept = text_of(file.path);
  CHECK(all.starts_with(kept));
  CHECK(std::count(kept.begin(), kept.end(), '\n') == 2);
  {
    MetricsWriter writer(file.path, 2);
    writer.write(record(3)), writer.write(record(4));
    writer.write(ValidationRecord{4, 1, {}, 1, 1});
  }
  CHECK(text_of(file.path) == all);
  { MetricsWriter writer(file.path, 0); }
  CHECK(text_of(file.path).empty());
}

TEST_CASE("metrics that cannot be written are an error") {
  CHECK_THROWS_AS(MetricsWriter("no/such/folder/metrics.jsonl", 0), DataError);
}

TEST_CASE("ranks that fell silent too close in time to tell are all named as the first") {
  const auto rank = [](int number, double silent_since, bool ended = false) {
    StatusReport r;
    r.rank = number, r.silent_since = silent_since, r.ended = ended;
    return r;
  };
  using Ranks = std::vector<int>;
  CHECK(silent_first({rank(0, 105), rank(1, 100), rank(2, 105)}) == Ranks{1});
  CHECK(silent_first({rank(0, 100), rank(1, 101), rank(2, 100.0003)}) == Ranks{0, 2});
  CHECK(silent_first({rank(0, 100.2), rank(1, 101), rank(2, 100)}) == Ranks{2});
  CHECK(silent_first({rank(0, 90, true), rank(1, 101), rank(2, 100)}) == Ranks{2});

  const std::string text = describe_status({rank(0, 100), rank(1, 101), rank(2, 100.0003)});
  CHECK(text.find("silent first: one of ranks 0 2 (within 0.1 s)") != std::string::npos);
  CHECK(describe_status({rank(0, 100, true), rank(1, 101, true)}).find("silent") == std::string::npos);
}
