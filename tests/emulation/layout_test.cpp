#include "cuda/emulation/options.h"
#include "tests/emulation/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/device_array.h"

#include <numeric>

using namespace strata;
using emulation::Options;
using emulation::Order;
using test::DeviceArray;

namespace {

std::vector<Options> schedules() {
  std::vector<Options> all;
  for (const auto kind : {emulation::FiberKind::ucontext, emulation::default_fiber_kind()}) {
    for (const auto order : {Order::forward, Order::reverse, Order::random}) {
      for (const auto copies : {emulation::CopyTime::at_issue, emulation::CopyTime::at_wait}) {
        Options options;
        options.threads = order;
        options.blocks = order;
        options.seed = 7;
        options.copies = copies;
        options.fibers = kind;
        all.push_back(options);
      }
    }
  }
  return all;
}

}  // namespace

TEST_CASE("ldmatrix gives lane l the elements (l/4, 2(l%4)) and its neighbour of each tile") {
  for (const int tiles : {1, 2, 4}) {
    for (const bool transposed : {false, true}) {
      std::vector<std::uint16_t> in(static_cast<std::size_t>(tiles) * 64);
      std::iota(in.begin(), in.end(), std::uint16_t{100});
      const DeviceArray<std::uint16_t> source(in);
      const DeviceArray<std::uint32_t> target(static_cast<std::size_t>(tiles) * 32);
      test::launch_load_tiles(target.data(), source.data(), tiles, transposed);
      const auto out = target.download();
      for (int lane = 0; lane < 32; ++lane) {
        for (int t = 0; t < tiles; ++t) {
          const int row = lane / 4;
          const int column = lane % 4 * 2;
          const auto at = [&](int r, int c) { return static_cast<std::uint32_t>(100 + t * 64 + r * 8 + c); };
          const std::uint32_t expected = transposed ? at(column, row) | at(column + 1, row) << 16
                                                    : at(row, column) | at(row, column + 1) << 16;
          REQUIRE(out[static_cast<std::size_t>(lane * tiles + t)] == expected);
        }
      }
      CHECK(emulation::last_launch_counters().ldmatrix == 1);
      CHECK(emulation::last_launch_counters().ldmatrix_tiles == static_cast<std::uint64_t>(tiles));
    }
  }
}

TEST_CASE("mma m16n8k16 through ldmatrix and cp.async is a matrix product in every schedule") {
  // Small whole numbers: every product and sum is exact, so any wrong lane shows.
  std::vector<__nv_bfloat16> a(256);
  std::vector<__nv_bfloat16> b(128);
  std::vector<float> c(128);
  for (int i = 0; i < 256; ++i)
    a[static_cast<std::size_t>(i)] = __float2bfloat16(static_cast<float>(i * 37 % 19 - 9));
  for (int i = 0; i < 128; ++i)
    b[static_cast<std::size_t>(i)] = __float2bfloat16(static_cast<float>(i * 23 % 17 - 8));
  for (int i = 0; i < 128; ++i) c[static_cast<std::size_t>(i)] = static_cast<float>(i - 64);
  for (const Options& options : schedules()) {
    const emulation::ScopedOptions scope(options);
    const DeviceArray<__nv_bfloat16> da(a);
    const DeviceArray<__nv_bfloat16> db(b);
    const DeviceArray<float> dc(c);
    test::launch_multiply_bf16(dc.data(), da.data(), db.data());
    const auto out = dc.download();
    for (std::size_t m = 0; m < 16; ++m) {
      for (std::size_t n = 0; n < 8; ++n) {
        float expected = c[m * 8 + n];
        for (std::size_t k = 0; k < 16; ++k)
          expected += __bfloat162float(a[m * 16 + k]) * __bfloat162float(b[k * 8 + n]);
        REQUIRE(out[m * 8 + n] == expected);
      }
    }
    CHECK(emulation::last_launch_counters().mma_bf16 == 1);
    CHECK(emulation::last_launch_counters().cp_async_bytes == (256 + 128) * 2);
  }
}

TEST_CASE("mma m16n8k8 drops the operands' bits below tf32") {
  std::vector<float> a(128);
  std::vector<float> b(64);
  for (int i = 0; i < 128; ++i) a[static_cast<std::size_t>(i)] = static_cast<float>(i * 37 % 19 - 9);
  for (int i = 0; i < 64; ++i) b[static_cast<std::size_t>(i)] = static_cast<float>(i * 23 % 17 - 8);
  a[5] = 1.0f + 0x1p-12f;  // 1 in tf32
  const DeviceArray<float> da(a);
  const DeviceArray<float> db(b);
  const DeviceArray<float> dc(std::vector<float>(128, 0.25f));
  test::launch_multiply_tf32(dc.data(), da.data(), db.data());
  a[5] = 1.0f;
  const auto out = dc.download();
  for (std::size_t m = 0; m < 16; ++m) {
    for (std::size_t n = 0; n < 8; ++n) {
      float expected = 0.25f;
      for (std::size_t k = 0; k < 8; ++k) expected += a[m * 8 + k] * b[k * 8 + n];
      REQUIRE(out[m * 8 + n] == expected);
    }
  }
  CHECK(emulation::last_launch_counters().mma_tf32 == 1);
}

TEST_CASE("shuffles and votes follow CUDA's definitions in every schedule") {
  for (const Options& options : schedules()) {
    const emulation::ScopedOptions scope(options);
    const DeviceArray<long long> target(3 * 96 * 8);
    test::launch_shuffle(target.data(), 3, 96);
    const auto out = target.download();
    for (int i = 0; i < 3 * 96; ++i) {
      const int lane = i % 32;
      const long long* o = &out[static_cast<std::size_t>(i) * 8];
      REQUIRE(o[0] == lane / 2 * 10);
      REQUIRE(o[1] == (lane ^ 5) * 10);
      REQUIRE(o[2] == (lane % 8 + 3 < 8 ? lane + 3 : lane) * 10);
      REQUIRE(o[3] == (lane % 16 >= 2 ? lane - 2 : lane) * 10 + (1LL << 40));
      REQUIRE(o[4] == 0x49249249LL);
      REQUIRE(o[5] == 2);
      REQUIRE(o[6] == (lane < 8 ? 0xfb : 0));
      REQUIRE(o[7] == (lane ^ 16));
    }
  }
}

TEST_CASE("block votes count predicates over a block that is not a multiple of a warp") {
  const DeviceArray<int> target(75 * 3);
  test::launch_block_votes(target.data(), 75);
  const auto out = target.download();
  for (std::size_t i = 0; i < 75; ++i) {
    REQUIRE(out[i * 3] == 25);
    REQUIRE(out[i * 3 + 1] == 1);
    REQUIRE(out[i * 3 + 2] == 0);
  }
}

TEST_CASE("cp.async fills with zeros what its source does not give") {
  std::vector<unsigned char> in(16);
  std::iota(in.begin(), in.end(), static_cast<unsigned char>(1));
  for (const Options& options : schedules()) {
    const emulation::ScopedOptions scope(options);
    for (const int bytes : {0, 2, 10, 16}) {
      const DeviceArray<unsigned char> source(in);
      const DeviceArray<unsigned char> target(16);
      test::launch_zero_fill(target.data(), source.data(), bytes);
      const auto out = target.download();
      for (int i = 0; i < 16; ++i) REQUIRE(out[static_cast<std::size_t>(i)] == (i < bytes ? i + 1 : 0));
    }
  }
}

TEST_CASE("atomics update as CUDA defines them") {
  const DeviceArray<int> i(std::vector<int>{3, -1, 100, 0});
  const DeviceArray<unsigned> u(std::vector<unsigned>{0});
  const DeviceArray<float> f(std::vector<float>{1});
  test::launch_atomics(i.data(), u.data(), f.data(), 64);
  CHECK(i.download() == std::vector<int>{3 + 64 * 63 / 2, 63, -5, 128});
  CHECK(u.download()[0] == 64 % 10);
  CHECK(f.download()[0] == 33.0f);
}
