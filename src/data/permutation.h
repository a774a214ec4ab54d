#pragma once
#include <cstdint>

namespace strata {

// A seeded bijection of [0, size) computed element by element, without a table: a Feistel network over the
// smallest even number of bits that holds `size`, walked along its cycle until it lands inside.
class Permutation {
 public:
  // size from 1 to 2^62. The same (size, seed, epoch) always gives the same order.
  Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch);
  std::int64_t operator()(std::int64_t index) const;  // index in [0, size)

 private:
  std::uint64_t encrypt(std::uint64_t x) const;

  static constexpr int kRounds = 6;
  std::uint64_t size_ = 1;
  int half_bits_ = 1;
  std::uint64_t keys_[kRounds] = {};
};

}  // namespace strata
