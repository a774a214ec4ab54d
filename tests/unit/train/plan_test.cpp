#include "train/plan.h"

#include <numeric>

#include "base/error.h"
#include "config/load.h"
#include "tests/support/catch.h"

using namespace strata;

namespace {

RunPlan plan_of(const std::string& name, const std::vector<std::string>& sets = {}) {
  return plan_run(load_config(std::string(STRATA_SOURCE_DIR) + "/configs/" + name, sets));
}

std::int64_t received(const ByteCounters& c, Traffic traffic, Collective collective) {
  return c.at(traffic, collective).received;
}

std::size_t memory(const RunPlan& plan, Purpose purpose) {
  return plan.memory[static_cast<std::size_t>(purpose)];
}

// Llama 3.1 8B: elements of a decoder layer, and of the tied root.
constexpr std::int64_t kLayer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2), kRoot = 4096 * 128257;
constexpr std::int64_t kLayers = 32;

}  // namespace

TEST_CASE("the paper's runs move the bytes of its equations in their physical form") {
  const std::int64_t bytes = 2;  // bf16 everywhere
  for (const auto& [name, shards, replicas] :
       {std::tuple{"paper/fsdp.json", 512, 1}, {"paper/hsdp.json", 4, 128}, {"paper/fl_hsdp.json", 4, 8}}) {
    INFO(name);
    const RunPlan plan = plan_of(name);
    CHECK(plan.parameters == 7504924672);
    const auto gathered =
        kLayers * kLayer / shards * (shards - 1) * bytes;  // all sizes divide 512 x 8 evenly
    CHECK(received(plan.step.shard, Traffic::training, Collective::all_gather) == 2 * gathered);
    CHECK(received(plan.step.shard, Traffic::training, Collective::reduce_scatter) == gathered);
    // The tied root is gathered once. 512 shards of it need padding to multiples of 8 elements.
    const std::int64_t root = (kRoot + shards * 8 - 1) / (shards * 8) * 8;
    CHECK(received(plan.step.shard, Traffic::edge, Collective::all_gather) == root * (shards - 1) * bytes);
    CHECK(received(plan.step.shard, Traffic::edge, Collective::reduce_scatter) ==
          root * (shards - 1) * bytes);
    const auto reduced = 2 * (kLayer / shards) * (replicas - 1) / replicas * kLayers * bytes;
    CHECK(received(plan.step.replicate, Traffic::training, Collective::all_reduce) == reduced);
  }
  const RunPlan fl = plan_of("paper/fl_hsdp.json");
  CHECK(fl.aggregation_step == 8);
  CHECK(received(fl.aggregation.federate, Traffic::training, Collective::all_reduce) ==
        2 * (kLayer / 4) * 15 / 16 * kLayers * bytes);
}

TEST_CASE("a pure bf16 rank holds its share of weights, gradients and moments") {
  const RunPlan plan = plan_of("paper/ddp.json");
  const auto parameters = static_cast<std::size_t>(plan.parameters);
  CHECK(memory(plan, Purpose::weights) == 2 * parameters);
  CHECK(memory(plan, Purpose::gradients) == 2 * parameters);
  CHECK(memory(plan, Purpose::moments) == 4 * parameters);
  CHECK(memory(plan, Purpose::outer) == 0);
  CHECK(memory(plan, Purpose::activations) == plan.activations.bytes);
  CHECK(memory(plan_of("paper/fsdp.json"), Purpose::moments) < 4 * parameters / 500);
}

TEST_CASE("the text of a plan shows arithmetic, groups, purposes and what is unknown") {
  const Config c = load_config(std::string(STRATA_SOURCE_DIR) + "/configs/small/fl_hsdp.json");
  const std::string text = describe(c, plan_run(c));
  INFO(text);
  for (const char* piece : {"2 x 2 x 2 = 8", "[0,1] [2,3]", "[0,2] [1,3]", "[0,4] [1,5]", "weights",
                            "gradients", "moments", "activations", "workspace", "outer state", "total",
                            "besides, for the process itself", "edge units", "aggregation after step 8"}) {
    INFO(piece);
    CHECK(text.find(piece) != std::string::npos);
  }
  CHECK(text.find("depends on the GPU") == std::string::npos);
  const Config gpu = load_config(std::string(STRATA_SOURCE_DIR) + "/configs/paper/fsdp.json");
  CHECK(describe(gpu, plan_run(gpu)).find("depends on the GPU") != std::string::npos);
  CHECK_THROWS_AS(plan_run(gpu).mesh.require_world(511), UsageError);
}
