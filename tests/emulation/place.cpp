#include "tests/emulation/kernels.h"

#include <fstream>
#include <stdexcept>

namespace strata::test {

std::string place_of(const std::string& file, const std::string& mark) {
  const std::string path = "tests/emulation/" + file;
  std::ifstream source(std::string(STRATA_SOURCE_DIR) + "/" + path);
  std::string text;
  for (int line = 1; std::getline(source, text); ++line) {
    const auto at = text.find(mark);
    // The mark ends at a blank or at the end of the line: "older:wait" is not "older:waiting".
    if (at != std::string::npos && (at + mark.size() == text.size() || text[at + mark.size()] == ' ')) {
      return path + ":" + std::to_string(line);
    }
  }
  throw std::runtime_error("no line of " + path + " has the mark " + mark);
}

}  // namespace strata::test
