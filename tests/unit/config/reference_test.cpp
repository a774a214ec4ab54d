// What stands in the tree next to the code: the README's reference and the example configurations.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "config/keys.h"
#include "config/load.h"
#include "tests/support/catch.h"

using namespace strata;

namespace {

const std::string kRoot = STRATA_SOURCE_DIR;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

}  // namespace

TEST_CASE("the README's reference is what `trainer config-reference` prints") {
  const std::string readme = read_file(kRoot + "/README.md");
  const std::string begin = "<!-- config-reference begin -->\n", end = "<!-- config-reference end -->";
  const auto from = readme.find(begin);
  REQUIRE(from != std::string::npos);
  const auto to = readme.find(end, from);
  REQUIRE(to != std::string::npos);
  INFO("-> scripts/config_reference.sh writes it again");
  CHECK(readme.substr(from + begin.size(), to - from - begin.size()) == config_reference());
}

TEST_CASE("every example configuration is valid, and the paper's are its meshes and settings") {
  int seen = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kRoot + "/configs")) {
    if (entry.path().extension() != ".json") continue;
    INFO(entry.path().string());
    const Config c = load_config(entry.path().string());
    CHECK(read_config(write_config(c), "resolved") == c);
    if (entry.path().parent_path().filename() == "paper") {
      CHECK(c.mesh.federate * c.mesh.replicate * c.mesh.shard == 512);
      CHECK(c.precision == "bf16_pure");
      CHECK(c.model.tie_word_embeddings);
      CHECK(c.schedule.steps * 512 * c.data.batch_size == 65536);  // the paper's training samples
    }
    ++seen;
  }
  CHECK(seen >= 10);
}
