// Attention of bf16 tensors on bf16 dot products: the way of ops_attention.cpp tile by tile, but operands
// stay bf16. Probabilities and the gradients of scores are rounded to bf16 before they are multiplied on, as
// flash attention does on a GPU; scores, sums and results are fp32 until they are written.
#if defined(STRATA_OPS_ATTENTION_DOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_OPS_ATTENTION_DOTS_INL_H_
#undef STRATA_OPS_ATTENTION_DOTS_INL_H_
#else
#define STRATA_OPS_ATTENTION_DOTS_INL_H_
#endif

#include <limits>

#include "backend/cpu/ops_attention-inl.h"
#include "backend/cpu/ops_dots-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
HWY_INLINE bool use_dots(DType type) {
  return type == DType::bf16 && has_dots();
}
#if HWY_TARGET != HWY_AVX3
// Never called: use_dots is false.
inline size_t dots_forward_floats(const Sizes&) {
  return 0;
}
inline size_t dots_backward_floats(const Sizes&) {
  return 0;
}
inline void dots_forward(const Sizes&, Matrix, float*, ConstMatrix, ConstMatrix, ConstMatrix, std::int64_t,
                         std::int64_t, std::int64_t, float*) {}
inline void dots_backward(const Sizes&, Matrix, Matrix, Matrix, ConstMatrix, ConstMatrix, const float*,
                          ConstMatrix, ConstMatrix, ConstMatrix, std::int64_t, std::int64_t, std::int64_t,
                          float*) {}
#endif
}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_TARGET == HWY_AVX3
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr size_t kQueryPairs = kQueries / 2;
static_assert(kQueries % kDotRows == 0 && kKeys % kDotRows == 0 && kKeys % kDotCols == 0);

// Head elements of a row in pairs, and rows of the sequence in pairs.
size_t head_pairs(const Sizes& s) {
  return s.head / 2;
}
size_t sequence_pairs(const Sizes& s) {
  return (s.sequence + 1) / 2;
}

Pair* take_pairs(Carver& carver, size_t count) {
  return reinterpret_cast<Pair*>(carver.take(count));
}
bf16* take_bf16(Carver& carver, size_t count) {
  return reinterpret_cast<bf16*>(carver.take(count / 2));
}

struct DotsForwardScratch {
  DotsForwardScratch(const Sizes& s, float* at) : carver(at) {
    keys = take_pairs(carver, s.keys_padded * head_pairs(s));
    values = take_pairs(carver, sequence_pairs(s) * s.head_padded);
    queries = take_bf16(carver, kQueries * s.head);
    probabilities = take_bf16(carver, kQueries * kKeys);
    scores = carver.take(kQueries * kKeys);
    out = carver.take(kQueries * s.head_padded);
  }
  Carver carver;
  Pair *keys, *values;
  bf16 *queries, *probabilities;
  float *scores, *out;
};

struct DotsBackwardScratch {
  DotsBackwardScratch(const Sizes& s, float* at) : carver(at) {
    keys = take_pairs(carver, s.keys_padded * head_pairs(s));
    values = take_pairs(carver, s.keys_padded * head_pairs(s));
    key_rows = take_pairs(carver, sequence_pairs(s) * s.head_padded);
    queries = take_bf16(carver, kQueries * s.head);
    douts = take_bf16(carver, kQueries * s.head);
    query_rows = take_pairs(carver, kQueryPairs * s.head_padded);
    dout_rows = take_pairs(carver, kQueryPairs * s.head_padded);
    probabilities = take_pairs(carver, kQueryPairs * kKeys);
    dscores_down = take_pairs(carver, kQueryPairs * kKeys);
    dscores_along = take_bf16(carver, kQueries * kKeys);
    dkeys = carver.take(s.keys_padded * s.head_padded);
    dvalues = carver.take(s.keys_padded * s.head_padded);
    scores = carver.take(kQueries * kKeys);
    dscores = carver.take(kQueries * kKeys);
    dqueries = carver.take(kQueries * s.head_padded);
  }
  Carver carver;
  Pair *keys, *values, *key_rows, *query_rows, *dout_rows;
  bf16 *queries, *douts;
  Pair *probabilities, *dscores_down;  // (kQueryPairs, kKeys): pairs of queries
  bf16* dscores_along;                 // (kQueries, kKeys)
  float *dkeys, *dvalues, *scores, *dscores, *dqueries;
};

// Rows of x as the columns of B, panels over rows.
void pack_columns(const Head<const bf16>& x, const Sizes& s, Pair* to) {
  for (size_t r = 0; r < s.sequence; r += kDotCols, to += kDotCols * head_pairs(s)) {
    pack_pairs_transposed(x.row(r), x.stride, std::min(kDotCols, s.sequence - r), s.head, to);
  }
}
// `rows` rows of x from `first` on as the depth of B: panels over the head's elements, `depth` pairs each.
void pack_depth(const Head<const bf16>& x, size_t first, size_t rows, size_t depth, size_t head, Pair* to) {
  for (size_t c = 0; c < head; c += kDotCols) {
    pack_pairs_straight(x.row(first) + c, x.stride, rows, std::min(kDotCols, head - c), to + c * depth);
  }
}
// Rows as the rows of A, zero up to kQueries.
void copy_rows(const Head<const bf16>& x, size_t first, size_t rows, size_t head, bf16* to) {
  for (size_t r = 0; r < rows; ++r, to += head) std::memcpy(to, x.row(first + r), head * sizeof(bf16));
  std::memset(to, 0, (kQueries - rows) * head * sizeof(bf16));
}

// scores (kQueries, kKeys) = rows x keys, where the mask lets any through.
void dots_of_tile(const Tile& tile, const bf16* rows, const Pair* keys, size_t pairs, float* scores) {
  for (size_t i = 0; i < tile.queries; i += kDotRows) {
    const size_t columns = tile.visible_block(i);
    for (size_t j = 0; j < columns; j += kDotCols) {
      tile_dots<kDotRows>(rows + i * 2 * pairs, 2 * pairs, 2, keys + (tile.k0 + j) * pairs, pairs,
                          scores + i * kKeys + j, kKeys, false);
    }
  }
}

// to (kQueries, head_padded) += along (pairs of keys) x packed (panels over the head, `depth` pairs).
void dots_on(const Tile& tile, const bf16* along, const Pair* packed, size_t depth, const Sizes& s,
             float* to) {
  for (size_t i = 0; i < tile.queries; i += kDotRows) {
    const size_t pairs = (tile.visible_block(i) + 1) / 2;
    if (pairs == 0) continue;
    for (size_t c = 0; c < s.head; c += kDotCols) {
      tile_dots<kDotRows>(along + i * kKeys, kKeys, 2, packed + c * depth + tile.k0 / 2 * kDotCols, pairs,
                          to + i * s.head_padded + c, s.head_padded, true);
    }
  }
}

// to (keys, head_padded) += transpose of down (pairs of queries) x packed (panels over the head, kQueryPairs
// pairs).
void dots_transposed(const Tile& tile, const Pair* down, const Pair* packed, const Sizes& s, float* to) {
  for (size_t j = 0; j < tile.keys; j += kDotRows) {
    if (tile.first_row(j) >= tile.queries) break;
    const size_t first = tile.first_row(j) / 2;
    for (size_t c = 0; c < s.head; c += kDotCols) {
      tile_dots<kDotRows>(reinterpret_cast<const bf16*>(down + first * kKeys + j), 2, 2 * kKeys,
                          packed + c * kQueryPairs + first * kDotCols, (tile.queries + 1) / 2 - first,
                          to + (tile.k0 + j) * s.head_padded + c, s.head_padded, true);
    }
  }
}

// The first `count` of the 16 lanes, all when there are more.
HWY_INLINE __mmask16 first_lanes(size_t count) {
  return count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1);
}
HWY_INLINE __m512 exponential(const float* scores, VecF factor, VecF shift, __mmask16 seen) {
  return _mm512_maskz_mov_ps(seen, exp(hn::MulSub(hn::LoadU(F32(), scores), factor, shift)).raw);
}

// One row of scores to exp(scale * score - maximum) in `to`; returns their sum and updates maximum. Zero up
// to the kDotCols that hold `cover`.
HWY_INLINE float exponentials_along(float* row, size_t count, size_t cover, float scale, float& maximum,
                                    bf16* to) {
  const F32 d;
  for (size_t j = count; j < round_up(count, 16); ++j) row[j] = row[0];
  VecF most = hn::LoadU(d, row);
  for (size_t j = 16; j < count; j += 16) most = hn::Max(most, hn::LoadU(d, row + j));
  maximum = std::max(maximum, max_of_lanes(most) * scale);
  const VecF factor = hn::Set(d, scale), shift = hn::Set(d, maximum);
  __m512 sum = _mm512_setzero_ps();
  size_t j = 0;
  for (; j < count; j += 32) {
    const __m512 low = exponential(row + j, factor, shift, first_lanes(count - j));
    const __m512 high =
        exponential(row + j + 16, factor, shift, first_lanes(count - std::min(count, j + 16)));
    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    _mm512_storeu_si512(to + j, to_bf16_pair(low, high));
  }
  for (; j < cover; j += 32) _mm512_storeu_si512(to + j, _mm512_setzero_si512());
  return _mm512_reduce_add_ps(sum);
}

// Scores and their gradients' first factor, from fp32 to pairs: probabilities down, gradients down and along.
// Zero where masked, up to the kDotCols that hold tile.keys.
void probabilities_and_gradients_in_pairs(const Tile& tile, const float* lse, const float* delta, float scale,
                                          const DotsBackwardScratch& scratch) {
  const F32 d;
  const size_t width = round_up(tile.keys, kDotCols);
  const VecF factor = hn::Set(d, scale);
  for (size_t i = 0; i < tile.queries; i += 2) {
    const bool both = i + 1 < tile.queries;
    const size_t last = both ? i + 1 : i;
    const size_t count0 = tile.visible(i), count1 = both ? tile.visible(i + 1) : 0;
    const size_t count = std::max(count0, count1);
    const VecF shift0 = hn::Set(d, lse[i]), shift1 = hn::Set(d, lse[last]);
    const VecF less0 = hn::Set(d, delta[i]), less1 = hn::Set(d, delta[last]);
    const float *p = scratch.scores + i * kKeys, *g = scratch.dscores + i * kKeys;
    Pair *p_down = scratch.probabilities + i / 2 * kKeys, *g_down = scratch.dscores_down + i / 2 * kKeys;
    bf16* along = scratch.dscores_along + i * kKeys;
    size_t j = 0;
    for (; j < count; j += 16) {
      const __mmask16 seen0 = first_lanes(count0 - std::min(count0, j));
      const __mmask16 seen1 = first_lanes(count1 - std::min(count1, j));
      auto gradient = [&](__m512 pj, const float* from, VecF less, __mmask16 seen) HWY_ATTR {
        const VecF slope = hn::Mul(hn::Mul(VecF{pj}, factor), hn::Sub(hn::LoadU(d, from), less));
        return _mm512_maskz_mov_ps(seen, slope.raw);
      };
      const __m512 p0 = exponential(p + j, factor, shift0, seen0);
      const __m512 p1 = exponential(p + kKeys + j, factor, shift1, seen1);
      const __m512i gradients =
          to_bf16_pair(gradient(p0, g + j, less0, seen0), gradient(p1, g + kKeys + j, less1, seen1));
      _mm512_storeu_si512(p_down + j, in_turn(to_bf16_pair(p0, p1)));
      _mm512_storeu_si512(g_down + j, in_turn(gradients));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(along + j), _mm512_castsi512_si256(gradients));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(along + kKeys + j),
                          _mm512_extracti64x4_epi64(gradients, 1));
    }
    for (; j < width; j += 16) {
      _mm512_storeu_si512(p_down + j, _mm512_setzero_si512());
      _mm512_storeu_si512(g_down + j, _mm512_setzero_si512());
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(along + j), _mm256_setzero_si256());
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(along + kKeys + j), _mm256_setzero_si256());
    }
  }
}

size_t dots_forward_floats(const Sizes& s) {
  return DotsForwardScratch(s, nullptr).carver.used();
}
size_t dots_backward_floats(const Sizes& s) {
  return DotsBackwardScratch(s, nullptr).carver.used();
}

void dots_forward(const Sizes& s, Matrix out, float* lse, ConstMatrix q, ConstMatrix k, ConstMatrix v,
                  std::int64_t batch, std::int64_t kv_head, std::int64_t query_heads, float* at) {
  const DotsForwardScratch scratch(s, at);
  const std::int64_t first_row = batch * static_cast<std::int64_t>(s.sequence);
  pack_columns(head_of<bf16>(k, first_row, kv_head, s), s, scratch.keys);
  pack_depth(head_of<bf16>(v, first_row, kv_head, s), 0, s.sequence, sequence_pairs(s), s.head,
             scratch.values);
  for (size_t g = 0; g < s.group; ++g) {
    const std::int64_t head = kv_head * static_cast<std::int64_t>(s.group) + static_cast<std::int64_t>(g);
    const auto queries = head_of<bf16>(q, first_row, head, s);
    const auto result = head_of<bf16>(out, first_row, head, s);
    float* lse_row = lse + (batch * query_heads + head) * static_cast<std::int64_t>(s.sequence);
    for (size_t q0 = 0; q0 < s.sequence; q0 += kQueries) {
      const size_t rows = std::min(kQueries, s.sequence - q0);
      copy_rows(queries, q0, rows, s.head, scratch.queries);
      std::fill_n(scratch.out, kQueries * s.head_padded, 0.0f);
      float maximum[kQueries], sum[kQueries];
      std::fill_n(maximum, kQueries, -std::numeric_limits<float>::infinity());
      std::fill_n(sum, kQueries, 0.0f);
      for (size_t k0 = 0; k0 < q0 + rows; k0 += kKeys) {
        const Tile tile{q0, rows, k0, std::min(kKeys, s.sequence - k0)};
        dots_of_tile(tile, scratch.queries, scratch.keys, head_pairs(s), scratch.scores);
        for (size_t i = 0; i < rows; ++i) {
          bf16* along = scratch.probabilities + i * kKeys;
          const size_t count = tile.visible(i), cover = tile.visible_block(i / kDotRows * kDotRows);
          if (count == 0) {
            std::memset(along, 0, round_up(cover, 2) * sizeof(bf16));
            continue;
          }
          const float before = maximum[i];
          const float added =
              exponentials_along(scratch.scores + i * kKeys, count, cover, s.scale, maximum[i], along);
          if (maximum[i] != before && k0 > 0) {
            const float fade = std::exp(before - maximum[i]);
            sum[i] *= fade;
            scale_row(scratch.out + i * s.head_padded, s.head_padded, fade);
          }
          sum[i] += added;
        }
        dots_on(tile, scratch.probabilities, scratch.values, sequence_pairs(s), s, scratch.out);
      }
      for (size_t i = 0; i < rows; ++i) {
        scale_row(scratch.out + i * s.head_padded, s.head_padded, 1.0f / sum[i]);
        lse_row[q0 + i] = maximum[i] + std::log(sum[i]);
      }
      write_rows(scratch.out, s.head_padded, rows, s.head, result, q0);
    }
  }
}

void dots_backward(const Sizes& s, Matrix dq, Matrix dk, Matrix dv, ConstMatrix dout, ConstMatrix out,
                   const float* lse, ConstMatrix q, ConstMatrix k, ConstMatrix v, std::int64_t batch,
                   std::int64_t kv_head, std::int64_t query_heads, float* at) {
  const DotsBackwardScratch scratch(s, at);
  const std::int64_t first_row = batch * static_cast<std::int64_t>(s.sequence);
  const auto keys = head_of<bf16>(k, first_row, kv_head, s);
  pack_columns(keys, s, scratch.keys);
  pack_columns(head_of<bf16>(v, first_row, kv_head, s), s, scratch.values);
  pack_depth(keys, 0, s.sequence, sequence_pairs(s), s.head, scratch.key_rows);
  std::fill_n(scratch.dkeys, s.keys_padded * s.head_padded, 0.0f);
  std::fill_n(scratch.dvalues, s.keys_padded * s.head_padded, 0.0f);
  for (size_t g = 0; g < s.group; ++g) {
    const std::int64_t head = kv_head * static_cast<std::int64_t>(s.group) + static_cast<std::int64_t>(g);
    const auto queries = head_of<bf16>(q, first_row, head, s);
    const auto results = head_of<bf16>(out, first_row, head, s);
    const auto douts = head_of<bf16>(dout, first_row, head, s);
    const float* lse_row = lse + (batch * query_heads + head) * static_cast<std::int64_t>(s.sequence);
    for (size_t q0 = 0; q0 < s.sequence; q0 += kQueries) {
      const size_t rows = std::min(kQueries, s.sequence - q0);
      copy_rows(queries, q0, rows, s.head, scratch.queries);
      copy_rows(douts, q0, rows, s.head, scratch.douts);
      pack_depth(queries, q0, rows, kQueryPairs, s.head, scratch.query_rows);
      pack_depth(douts, q0, rows, kQueryPairs, s.head, scratch.dout_rows);
      float delta[kQueries];
      for (size_t i = 0; i < rows; ++i) delta[i] = dot(douts.row(q0 + i), results.row(q0 + i), s.head);
      std::fill_n(scratch.dqueries, kQueries * s.head_padded, 0.0f);
      for (size_t k0 = 0; k0 < q0 + rows; k0 += kKeys) {
        const Tile tile{q0, rows, k0, std::min(kKeys, s.sequence - k0)};
        dots_of_tile(tile, scratch.queries, scratch.keys, head_pairs(s), scratch.scores);
        dots_of_tile(tile, scratch.douts, scratch.values, head_pairs(s), scratch.dscores);
        probabilities_and_gradients_in_pairs(tile, lse_row + q0, delta, s.scale, scratch);
        dots_on(tile, scratch.dscores_along, scratch.key_rows, sequence_pairs(s), s, scratch.dqueries);
        dots_transposed(tile, scratch.probabilities, scratch.dout_rows, s, scratch.dvalues);
        dots_transposed(tile, scratch.dscores_down, scratch.query_rows, s, scratch.dkeys);
      }
      write_rows(scratch.dqueries, s.head_padded, rows, s.head, head_of<bf16>(dq, first_row, head, s), q0);
    }
  }
  write_rows(scratch.dkeys, s.head_padded, s.sequence, s.head, head_of<bf16>(dk, first_row, kv_head, s), 0);
  write_rows(scratch.dvalues, s.head_padded, s.sequence, s.head, head_of<bf16>(dv, first_row, kv_head, s), 0);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_POP_ATTRIBUTES
#endif

#endif  // include guard of this target
