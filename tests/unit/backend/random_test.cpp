#include "backend/random.h"

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/ops_fixture.h"

using namespace strata;
using namespace strata::test;

TEST_CASE("Philox4x32-10 gives the published test vectors") {
  auto check = [](PhiloxBlock b, std::uint32_t w0, std::uint32_t w1, std::uint32_t w2, std::uint32_t w3) {
    CHECK((b.word[0] == w0 && b.word[1] == w1 && b.word[2] == w2 && b.word[3] == w3));
  };
  check(philox4x32(0, 0, 0, 0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  check(philox4x32(~0u, ~0u, ~0u, ~0u, ~0u, ~0u), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  check(philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0), 0xd16cfe09,
        0x94fdcceb, 0x5001e420, 0x24126ea1);
}

TEST_CASE("normals are within 1e-6 of Box-Muller in double precision") {
  double worst = 0;
  auto compare = [&](std::uint32_t a, std::uint32_t b) {
    float first, second;
    normal_pair(a, b, first, second);
    const double radius = std::sqrt(-2 * std::log(((a >> 8) + 1.0) / 16777216));
    const std::uint32_t t =
        b >> 8;  // a quarter turn is exact in integers; libm's sine of a rounded pi is not
    const double angle = 2 * M_PI * (t % 4194304) / 16777216, c = std::cos(angle), s = std::sin(angle);
    const double cosine[] = {c, -s, -c, s}, sine[] = {s, c, -s, -c};
    for (auto [found, expected] :
         {std::pair{first, radius * cosine[t / 4194304]}, std::pair{second, radius * sine[t / 4194304]}}) {
      if (std::fabs(expected) < 1e-12) {
        if (std::fabs(found) > 1e-12) worst = 1;
      } else {
        worst = std::max(worst, std::fabs(found / expected - 1));
      }
    }
  };
  for (std::uint32_t i = 0; i < 1000000; ++i) compare(i * 2654435761u, i * 40503u * 2246822519u);
  for (std::uint32_t edge : {0u, 255u, 256u, 0x3fffffffu, 0x40000000u, 0x7fffffffu, 0x80000000u, 0xfffffe00u,
                             0xffffffffu, 0x1fffffffu, 0x20000000u})
    for (std::uint32_t other : {0u, 0x80000000u, 0xfffffe00u, 0xffffffffu})
      compare(edge, other), compare(other, edge);
  CHECK(worst < 1e-6);
}

TEST_CASE("initialisation depends on the element alone and has the moments of a normal") {
  CpuFixture f({}, {.threads = 2});
  const RandomKey key = random_key(42, "initialise", "layer.0.weight");
  const std::int64_t count = 200003;
  Tensor whole(DType::f32, 1, count), part(DType::f32, 1, 70001), narrow(DType::bf16, 1, 1000);
  f.ops->initialize_normal(f.stream, whole.flat(), 0.5f, key, 0);
  f.ops->initialize_normal(f.stream, part.flat(), 0.5f, key, 1237);
  f.ops->initialize_normal(f.stream, narrow.flat(), 0.5f, key, 3);
  const Vector all = whole.values(), cut = part.values(), half = narrow.values();
  double sum = 0, squares = 0, fourth = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    REQUIRE(all[i] == static_cast<double>(0.5f * normal(key, static_cast<std::uint64_t>(i))));
    const double z = all[i] / 0.5;
    sum += z, squares += z * z, fourth += z * z * z * z;
  }
  for (std::size_t i = 0; i < cut.size(); ++i) REQUIRE(cut[i] == all[i + 1237]);
  for (std::size_t i = 0; i < half.size(); ++i) REQUIRE(half[i] == rounded(all[i + 3], DType::bf16));
  CHECK(std::fabs(sum / count) < 0.01);
  CHECK(std::fabs(squares / count - 1) < 0.02);
  CHECK(std::fabs(fourth / count - 3) < 0.15);
}

TEST_CASE("stochastic rounding is unbiased and keeps exact and special values") {
  const RandomKey key = random_key(1, "rounding", "w", 7);
  const float below = 1.0f, x = below + 0.3f / 128;  // bf16 near one has steps of 1/128
  double sum = 0;
  const int draws = 100000;
  for (int i = 0; i < draws; ++i) {
    const float y =
        to_float(bf16{stochastic_bf16_bits(x, rounding_word(key, static_cast<std::uint64_t>(i)))});
    REQUIRE((y == 1.0f || y == 1.0078125f));
    sum += y;
  }
  CHECK(std::fabs((sum / draws - below) * 128 - 0.3) < 0.01);
  CHECK(stochastic_bf16_bits(1.5f, 0xffff) == to_bf16(1.5f).bits);
  CHECK(stochastic_bf16_bits(INFINITY, 0xffff) == 0x7f80);
  CHECK(std::isnan(to_float(bf16{stochastic_bf16_bits(NAN, 0xffff)})));
}
