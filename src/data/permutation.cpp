#include "data/permutation.h"

#include <bit>

#include "base/error.h"

namespace strata {
namespace {

// SplitMix64's finalizer: every input bit reaches every output bit.
constexpr std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27, x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch)
    : size_(static_cast<std::uint64_t>(size)) {
  if (size < 1 || size > (std::int64_t{1} << 62)) {
    throw InternalError("a permutation needs between 1 and 2^62 elements, not " + std::to_string(size));
  }
  const int bits = std::bit_width(size_ - 1);
  half_bits_ = bits < 2 ? 1 : (bits + 1) / 2;
  std::uint64_t state = mix(mix(seed) + 0x9e3779b97f4a7c15ull * (static_cast<std::uint64_t>(epoch) + 1));
  for (std::uint64_t& key : keys_) key = mix(state += 0x9e3779b97f4a7c15ull);
}

std::uint64_t Permutation::encrypt(std::uint64_t x) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = x >> half_bits_, right = x & mask;
  for (const std::uint64_t key : keys_) {
    const std::uint64_t next = left ^ (mix(right + key) & mask);
    left = right, right = next;
  }
  return (left << half_bits_) | right;
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  if (index < 0 || static_cast<std::uint64_t>(index) >= size_) {
    throw InternalError("index " + std::to_string(index) + " lies outside a permutation of " +
                        std::to_string(size_));
  }
  // The domain is less than four times as large, so a walk takes fewer than four steps on average.
  auto x = static_cast<std::uint64_t>(index);
  do {
    x = encrypt(x);
  } while (x >= size_);
  return static_cast<std::int64_t>(x);
}

}  // namespace strata
