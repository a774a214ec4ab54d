#pragma once
#include <cstdint>
#include <string_view>

namespace strata {

// Key of a counter-based random stream: (seed, purpose, parameter name) hashed to 64 bits, and the step. The
// counter is the element's index within its parameter, so no mesh, thread count or order of calls changes a
// draw.
struct RandomKey {
  std::uint64_t key = 0;
  std::uint64_t step = 0;
};

// FNV-1a over the seed's bytes, the purpose and the name, finished with the SplitMix64 mixer (both public
// domain).
constexpr RandomKey random_key(std::uint64_t seed, std::string_view purpose, std::string_view name,
                               std::uint64_t step = 0) {
  std::uint64_t h = 0xcbf29ce484222325ull;
  auto byte = [&h](std::uint64_t b) { h = (h ^ (b & 0xff)) * 0x100000001b3ull; };
  for (int i = 0; i < 8; ++i) byte(seed >> (8 * i));
  for (char c : purpose) byte(static_cast<unsigned char>(c));
  byte(0);
  for (char c : name) byte(static_cast<unsigned char>(c));
  h ^= h >> 30, h *= 0xbf58476d1ce4e5b9ull;
  h ^= h >> 27, h *= 0x94d049bb133111ebull;
  h ^= h >> 31;
  return {h, step};
}

}  // namespace strata
