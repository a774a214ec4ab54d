#include "model/rope.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/catch.h"

using namespace strata;

TEST_CASE("rotary frequencies are Hugging Face's, with and without llama3 scaling") {
  std::ifstream file(STRATA_SOURCE_DIR "/tests/golden/rope.json");
  REQUIRE(file);
  for (const auto& golden : nlohmann::json::parse(file)) {
    INFO(golden["name"]);
    LlamaConfig config;
    config.head_dim = golden["head_dim"], config.rope_theta = golden["rope_theta"];
    if (const auto& s = golden["rope_scaling"]; !s.is_null()) {
      config.rope_scaling = RopeScaling{s["factor"], s["low_freq_factor"], s["high_freq_factor"],
                                        s["original_max_position_embeddings"]};
    }
    const auto expected = golden["inv_freq"].get<std::vector<double>>();
    const auto found = rope_frequencies(config);
    REQUIRE(found.size() == expected.size());
    // They were computed in fp32: theta to a power is good to a few units in the last place.
    for (std::size_t i = 0; i < found.size(); ++i)
      CHECK(found[i] == Approx(expected[i]).epsilon(1e-6).margin(0));
  }
}

TEST_CASE("rotary tables hold the cosine and sine of position times frequency") {
  LlamaConfig config;
  config.head_dim = 32, config.rope_theta = 10000;
  const RopeTables tables = rope_tables(config, 1001);
  REQUIRE(tables.cosine.size() == 1001 * 16);
  CHECK(tables.cosine[0] == 1.0f);
  CHECK(tables.sine[15] == 0.0f);
  CHECK(tables.sine[1000 * 16] == static_cast<float>(std::sin(1000.0)));
  CHECK(tables.cosine[1000 * 16 + 8] == static_cast<float>(std::cos(10.0)));  // 10000^(-1/2) = 1/100
}
