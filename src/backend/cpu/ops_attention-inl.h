// What attention's two ways share (ops_attention.cpp: fp32 arithmetic; ops_attention_dots-inl.h: bf16 dot
// products), for each instruction set.
#if defined(STRATA_OPS_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_OPS_ATTENTION_INL_H_
#undef STRATA_OPS_ATTENTION_INL_H_
#else
#define STRATA_OPS_ATTENTION_INL_H_
#endif

#include <cmath>
#include <type_traits>

#include "backend/cpu/ops_tile-inl.h"
#include "backend/ops.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {

using std::size_t;

// Multiples of kTileRows (6 or 12) and of tile_cols() (up to 32).
constexpr size_t kQueries = 48, kKeys = 192;

// Sizes of one call, in elements.
struct Sizes {
  explicit Sizes(const AttentionShape& s)
      : sequence(static_cast<size_t>(s.sequence)),
        head(static_cast<size_t>(s.head_size)),
        head_padded(round_up(head, kMaxTileCols)),
        keys_padded(round_up(sequence, round_up(kKeys, kMaxTileCols))),
        group(static_cast<size_t>(s.query_heads / s.key_value_heads)),
        scale(1.0f / std::sqrt(static_cast<float>(s.head_size))) {}
  size_t sequence, head, head_padded, keys_padded, group;
  float scale;
};

// Carves fp32 arrays out of the scratch, each on a cache line of its own.
class Carver {
 public:
  explicit Carver(float* at) : at_(at) {}
  float* take(size_t floats) {
    const size_t first = used_;
    used_ += round_up(floats, 16);
    return at_ != nullptr ? at_ + first : nullptr;
  }
  size_t used() const { return used_; }

 private:
  float* at_;
  size_t used_ = 0;
};

template <class T>
struct Head {
  T* data;
  size_t stride;
  T* row(size_t r) const { return data + r * stride; }
};
template <class T, class M>
auto head_of(const M& x, std::int64_t first_row, std::int64_t head, const Sizes& s) {
  using Pointer = std::conditional_t<std::is_same_v<M, Matrix>, T, const T>;
  return Head<Pointer>{
      static_cast<Pointer*>(x.data) + first_row * x.stride + head * static_cast<std::int64_t>(s.head),
      static_cast<size_t>(x.stride)};
}

// A tile of queries against a tile of keys: query q0 + i may see keys k0 + j <= q0 + i.
struct Tile {
  size_t q0, queries, k0, keys;
  // Keys of this tile that row i sees.
  size_t visible(size_t i) const { return q0 + i < k0 ? 0 : std::min(keys, q0 + i - k0 + 1); }
  // Keys of this tile that any of the kTileRows rows from i on sees.
  size_t visible_block(size_t i) const { return visible(std::min(i + kTileRows, queries) - 1); }
  // First row that sees key j of this tile.
  size_t first_row(size_t j) const { return k0 + j > q0 ? k0 + j - q0 : 0; }
};

HWY_INLINE void scale_row(float* row, size_t count, float by) {
  const VecF v = hn::Set(F32(), by);
  for (size_t i = 0; i < count; i += lanes()) store(hn::Mul(load(row + i), v), row + i);
}

template <class T>
HWY_INLINE float dot(const T* a, const T* b, size_t count) {
  VecF sum = hn::Zero(F32());
  for_vectors(count,
              [&](size_t i, size_t n) HWY_ATTR { sum = hn::MulAdd(load(a + i, n), load(b + i, n), sum); });
  return sum_of_lanes(sum);
}

template <class T>
HWY_INLINE void write_rows(const float* from, size_t from_stride, size_t rows, size_t head, const Head<T>& to,
                           size_t first) {
  for (size_t r = 0; r < rows; ++r) {
    T* row = to.row(first + r);
    for_vectors(head,
                [&](size_t c, size_t n) HWY_ATTR { store(load(from + r * from_stride + c), row + c, n); });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
