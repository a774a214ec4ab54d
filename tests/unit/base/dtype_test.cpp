#include "base/dtype.h"

#include <cmath>
#include <limits>

#include "tests/support/catch.h"

using namespace strata;

TEST_CASE("bf16 conversion rounds to nearest even and keeps special values") {
  CHECK(to_bf16(1.0f).bits == 0x3f80);
  CHECK(to_bf16(1.00390625f).bits == 0x3f80);  // exactly half way between 1 and the next: ties to even
  CHECK(to_bf16(1.01171875f).bits == 0x3f82);  // half way again, now up to even
  CHECK(to_bf16(std::numeric_limits<float>::max()).bits == 0x7f80);  // rounds up to infinity
  CHECK(to_bf16(-0.0f).bits == 0x8000);
  CHECK(std::isnan(to_float(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(to_float(to_bf16(std::numeric_limits<float>::infinity())) == std::numeric_limits<float>::infinity());
}

TEST_CASE("every bf16 survives the way to fp32 and back") {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const bf16 x{static_cast<std::uint16_t>(bits)};
    if (std::isnan(to_float(x))) continue;
    REQUIRE(to_bf16(to_float(x)).bits == x.bits);
  }
}
