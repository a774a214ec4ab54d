// Any text is a configuration or is refused with UsageError; an accepted one survives being written and read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "config/load.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // What follows the first NUL is the text of a --set.
  const std::string input(reinterpret_cast<const char*>(data), size);
  const auto cut = input.find('\0');
  std::vector<std::string> sets;
  if (cut != std::string::npos) sets.push_back(input.substr(cut + 1));
  const std::string text = input.substr(0, cut);
  // The fuzzer must not open files, devices least of all.
  if (input.find("path") != std::string::npos || input.find("\\u") != std::string::npos) return 0;
  strata::Config config;
  try {
    config = strata::read_config(text, "fuzz", sets);
  } catch (const strata::UsageError&) {
    return 0;
  }
  if (!(strata::read_config(strata::write_config(config), "resolved") == config)) std::abort();
  return 0;
}
