// Any bytes are a Megatron index or are refused with DataError; an accepted one describes ids inside the
// .bin.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "base/error.h"
#include "data/token_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // The first two bytes are the size of the .bin.
  if (size < 2) return 0;
  std::uint16_t bin_bytes;
  std::memcpy(&bin_bytes, data, sizeof bin_bytes);
  const auto index = std::as_bytes(std::span(data + 2, size - 2));
  try {
    const strata::TokenLayout layout = strata::parse_megatron_index(index, bin_bytes, "fuzz.idx");
    const bool inside = layout.offset == 0 && layout.tokens > 0 &&
                        layout.tokens * size_of(layout.type) == static_cast<std::int64_t>(bin_bytes);
    if (!inside || layout.documents < 1) std::abort();
  } catch (const strata::DataError&) {
  }
  return 0;
}
