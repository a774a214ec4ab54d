// Attention's tiles in shared memory: no bank conflicts, which no run in emulation would show.
//
// Shared memory has 32 banks of 4 bytes. 16-byte accesses go by eight lanes at a time, and ldmatrix reads one
// 8x8 matrix from eight lanes' rows at a time: either is free of conflicts when the eight places differ
// modulo 128 bytes.
#include "cuda/kernels/attention_tiles.cuh"
#include "tests/support/catch.h"

#include <functional>
#include <set>

using namespace strata::gpu::flash;

namespace {

// Distinct banks of 4 bytes (or groups of four, for 16 bytes) among the places, in elements, that `count`
// lanes use.
std::size_t banks(int count, int elements, const std::function<int(int)>& place) {
  std::set<int> used;
  for (int lane = 0; lane < count; ++lane) used.insert(place(lane) % 64 / elements);
  return used.size();
}

template <int D>
void check_tile() {
  CAPTURE(D);
  std::set<int> places;
  for (int row = 0; row < 64; ++row) {
    for (int chunk = 0; chunk < D / 8; ++chunk) places.insert(Tile<D>::at(row, chunk));
  }
  REQUIRE(places.size() == std::size_t{64} * D / 8);  // every chunk has a place of its own,
  CHECK(*places.rbegin() == 64 * D - 8);              // none outside of the tile
  for (int step = 0; step < D / 16; ++step) {
    for (int first = 0; first < 32; first += 8) {
      CHECK(banks(8, 8, [&](int lane) { return lane_row<D>(first + lane).at(16, step); }) == 8);
    }
  }
  // What ldmatrix reads is what was written there: the halves of a 16x16 block's rows.
  for (int lane = 0; lane < 32; ++lane) {
    for (int step = 0; step < D / 16; ++step) {
      CHECK(lane_row<D>(lane).at(32, step) == Tile<D>::at(32 + lane % 16, 2 * step + lane / 16));
    }
  }
  // Copies: neighbouring threads write neighbouring chunks (at 80 and 96 the last eight of a row are not all
  // there).
  for (int row = 0; row < 8; ++row) {
    for (int first = 0; first + 8 <= D / 8; first += 8) {
      CHECK(banks(8, 8, [&](int lane) { return Tile<D>::at(row, first + lane); }) == 8);
    }
  }
  // Accumulators: lane 4g + t writes 4 bytes of row g.
  for (int chunk = 0; chunk < D / 8; ++chunk) {
    CHECK(banks(32, 2, [&](int lane) { return Tile<D>::at(lane / 4, chunk) + 2 * (lane % 4); }) == 32);
  }
}

}  // namespace

TEST_CASE("attention's tiles are read and written without bank conflicts") {
  check_tile<32>();
  check_tile<64>();
  check_tile<80>();
  check_tile<96>();
  check_tile<128>();
  check_tile<256>();
}
