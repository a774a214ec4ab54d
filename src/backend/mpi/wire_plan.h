#pragma once
// How collectives cut their data among the ranks of a group, and how many bytes that moves. The byte counters
// must equal received_bytes and sent_bytes exactly.
#include <algorithm>
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

// A reduction receives its chunk in slices, two of every peer in flight at a time. Elements of a slice, the
// same on all ranks; scratch_bytes are what one reduction may use.
constexpr std::int64_t reduction_slice(DType wire, int n, std::int64_t message_bytes,
                                       std::int64_t scratch_bytes) {
  const std::int64_t bytes = std::min(message_bytes, scratch_bytes / 2 / (n - 1));
  const std::int64_t elements = bytes / static_cast<std::int64_t>(size_of(wire));
  return elements >= 64 ? elements / 64 * 64 : std::max<std::int64_t>(elements, 2);
}

// What a reduction of `count` elements allocates at place `rank` of a group of n.
struct ReductionScratch {
  std::int64_t stride = 0;  // bytes of a slice, 64-byte aligned
  std::int64_t windows = 1;
  std::int64_t bytes = 0;
};
constexpr ReductionScratch reduction_scratch(std::int64_t count, DType wire, int n, int rank,
                                             std::int64_t message_bytes, std::int64_t scratch_bytes) {
  if (n == 1) return {};
  const std::int64_t slice = reduction_slice(wire, n, message_bytes, scratch_bytes);
  const std::int64_t own = chunk_of(count, n, rank).count, element = static_cast<std::int64_t>(size_of(wire));
  ReductionScratch s;
  s.stride = (std::min(slice, own) * element + 63) / 64 * 64;
  s.windows = own > slice ? 2 : 1;
  s.bytes = s.stride * s.windows * n;
  return s;
}

}  // namespace strata
