// Any bytes are an llm.c shard or are refused with DataError; an accepted one describes ids inside the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "base/error.h"
#include "data/token_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const strata::TokenLayout layout =
        strata::parse_llmc_header(std::as_bytes(std::span(data, size)), "fuzz.bin");
    const std::int64_t end = layout.offset + layout.tokens * size_of(layout.type);
    if (layout.offset != 1024 || layout.tokens < 1 || end != static_cast<std::int64_t>(size)) std::abort();
  } catch (const strata::DataError&) {
  }
  return 0;
}
