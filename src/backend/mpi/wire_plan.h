#pragma once
// How collectives cut their data among the ranks of a group, and how many bytes that moves. The byte counters
// must equal received_bytes and sent_bytes exactly.
#include <cstdint>

#include "backend/communicator.h"
#include "base/dtype.h"

namespace strata {

// Broadcasts of up to this many bytes go from the root to everyone; larger ones are passed on in parts.
constexpr std::int64_t kFlatBroadcastBytes = 32 << 10;

// count elements in n consecutive chunks whose sizes differ by at most one, the larger ones first.
struct Chunk {
  std::int64_t begin = 0, count = 0;
};
constexpr Chunk chunk_of(std::int64_t count, int n, int rank) {
  const std::int64_t base = count / n, larger = count % n;
  return {rank * base + (rank < larger ? rank : larger), base + (rank < larger ? 1 : 0)};
}

struct WireBytes {
  std::int64_t received = 0, sent = 0;
};

// `count`: elements of the whole buffer (all_gather, reduce_scatter: the full one). root: broadcast only.
constexpr WireBytes wire_bytes(Collective collective, std::int64_t count, DType wire, int n, int rank,
                               int root = 0) {
  if (n == 1) return {};
  const auto element = static_cast<std::int64_t>(size_of(wire));
  const std::int64_t own = chunk_of(count, n, rank).count * element, all = count * element;
  switch (collective) {
    case Collective::all_gather:
      return {all - own, own * (n - 1)};
    case Collective::reduce_scatter:
      return {own * (n - 1), all - own};
    case Collective::all_reduce:
      return {own * (n - 1) + all - own, all - own + own * (n - 1)};
    case Collective::broadcast: {
      if (all <= kFlatBroadcastBytes || n == 2)
        return rank == root ? WireBytes{0, all * (n - 1)} : WireBytes{all, 0};
      if (rank == root) return {0, all};
      const int place = (rank - root + n) % n - 1;  // among the ranks that pass on
      return {all, chunk_of(count, n - 1, place).count * element * (n - 2)};
    }
    case Collective::count_:
      break;
  }
  return {};
}

}  // namespace strata
