// Causal attention with grouped queries, forward and backward, never holding more than a tile of scores.
//
// One call does one key/value head of one sequence with all query heads that read it. Keys and values are
// widened and packed once for the whole group. Scores of kQueries x kKeys are computed, turned into
// probabilities (online softmax forward, from the saved log-sum-exp backward) and multiplied on; what the
// causal mask hides is skipped, at the grain of a micro-kernel tile.
//
// bf16 on a CPU with bf16 dot products goes another way: ops_attention_dots-inl.h.
#include <cmath>
#include <limits>

#include "backend/cpu/ops_kernels.h"
#include "backend/cpu/ops_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/ops_attention.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/ops_attention-inl.h"
#include "backend/cpu/ops_attention_dots-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu {
namespace HWY_NAMESPACE {
namespace {

struct ForwardScratch {
  ForwardScratch(const Sizes& s, float* at) : carver(at) {
    keys = carver.take(s.keys_padded * s.head + 8);
    values = carver.take(s.sequence * s.head_padded);
    queries = carver.take(kQueries * s.head + 8);
    scores = carver.take(kQueries * kKeys);
    out = carver.take(kQueries * s.head_padded);
  }
  Carver carver;
  float *keys, *values, *queries, *scores, *out;
};

struct BackwardScratch {
  BackwardScratch(const Sizes& s, float* at) : carver(at) {
    keys = carver.take(s.keys_padded * s.head + 8);
    values = carver.take(s.keys_padded * s.head + 8);
    key_rows = carver.take(s.sequence * s.head_padded);
    dkeys = carver.take(s.keys_padded * s.head_padded);
    dvalues = carver.take(s.keys_padded * s.head_padded);
    queries = carver.take(kQueries * s.head + 8);
    douts = carver.take(kQueries * s.head + 8);
    query_rows = carver.take(kQueries * s.head_padded);
    dout_rows = carver.take(kQueries * s.head_padded);
    scores = carver.take(kQueries * kKeys);
    dscores = carver.take(kQueries * kKeys);
    dqueries = carver.take(kQueries * s.head_padded);
  }
  Carver carver;
  float *keys, *values, *key_rows, *dkeys, *dvalues, *queries, *douts, *query_rows, *dout_rows, *scores,
      *dscores, *dqueries;
};

// Rows of x as the columns of B: panels over rows, depth = head size.
template <class T>
void pack_as_columns(const Head<const T>& x, size_t rows, size_t depth, float* to) {
  const size_t width = tile_cols();
  for (size_t r = 0; r < rows; r += width, to += width * depth) {
    pack_transposed(x.row(r), x.stride, std::min(width, rows - r), depth, width, to);
  }
}
// Rows of x as the depth of B: panels over the head's elements, `depth` rows each.
template <class T>
void pack_as_depth(const Head<const T>& x, size_t depth, size_t head, float* to) {
  const size_t width = tile_cols();
  for (size_t c = 0; c < head; c += width, to += width * depth) {
    pack_straight(x.data + c, x.stride, depth, std::min(width, head - c), width, to);
  }
}
// Rows of x as the rows of A: slivers of kTileRows.
template <class T>
void pack_as_rows(const Head<const T>& x, size_t first, size_t rows, size_t head, float* to) {
  for (size_t r = 0; r < rows; r += kTileRows, to += kTileRows * head) {
    pack_transposed(x.row(first + r), x.stride, std::min(kTileRows, rows - r), head, kTileRows, to);
  }
}

// scores (kQueries, kKeys) = rows (packed slivers) x keys (packed panels), where the mask lets any through.
void score_tile(const Tile& tile, const float* rows, const float* keys, size_t head, float* scores) {
  const size_t width = tile_cols();
  for (size_t i = 0; i < tile.queries; i += kTileRows) {
    const size_t columns = tile.visible_block(i);
    for (size_t j = 0; j < columns; j += width) {
      tile_product<kTileRows>(rows + i * head, 1, kTileRows, keys + (tile.k0 + j) * head, head,
                              scores + i * kKeys + j, kKeys, false);
    }
  }
}

// to (kQueries, head_padded) += probabilities (kQueries, kKeys) x packed (panels over the head, `depth`
// rows).
void multiply_on(const Tile& tile, const float* probabilities, const float* packed, size_t depth,
                 size_t head_padded, size_t head, float* to) {
  const size_t width = tile_cols();
  for (size_t i = 0; i < tile.queries; i += kTileRows) {
    const size_t count = tile.visible_block(i);
    if (count == 0) continue;
    for (size_t c = 0; c < head; c += width) {
      tile_product<kTileRows>(probabilities + i * kKeys, kKeys, 1, packed + c * depth + tile.k0 * width,
                              count, to + i * head_padded + c, head_padded, true);
    }
  }
}

// to (keys, head_padded) += transpose of probabilities x packed (panels over the head, kQueries rows).
void multiply_transposed(const Tile& tile, const float* probabilities, const float* packed,
                         size_t head_padded, size_t head, float* to) {
  const size_t width = tile_cols();
  for (size_t j = 0; j < tile.keys; j += kTileRows) {
    const size_t first = tile.first_row(j);
    if (first >= tile.queries) break;
    for (size_t c = 0; c < head; c += width) {
      tile_product<kTileRows>(probabilities + first * kKeys + j, 1, kKeys,
                              packed + c * kQueries + first * width, tile.queries - first,
                              to + (tile.k0 + j) * head_padded + c, head_padded, true);
    }
  }
}

// One row of scores to exp(scale * score - maximum); returns their sum and updates maximum. Zeroes up to
// `cover`.
HWY_INLINE float exponentials(float* row, size_t count, size_t cover, float scale, float& maximum) {
  const F32 d;
  const size_t n = lanes();
  for (size_t j = count; j < round_up(count, n); ++j) row[j] = row[0];
  VecF most = hn::LoadU(d, row);
  for (size_t j = n; j < count; j += n) most = hn::Max(most, hn::LoadU(d, row + j));
  maximum = std::max(maximum, max_of_lanes(most) * scale);
  const VecF factor = hn::Set(d, scale), shift = hn::Set(d, maximum);
  VecF sum = hn::Zero(d);
  size_t j = 0;
  for (; j + n <= count; j += n) {
    const VecF p = exp(hn::MulSub(hn::LoadU(d, row + j), factor, shift));
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, row + j);
  }
  if (j < count) {
    const VecF p =
        hn::IfThenElseZero(hn::FirstN(d, count - j), exp(hn::MulSub(hn::LoadU(d, row + j), factor, shift)));
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, row + j);
    j += n;
  }
  for (; j < cover; j += n) hn::StoreU(hn::Zero(d), d, row + j);
  return sum_of_lanes(sum);
}

template <class T>
void forward(const Sizes& s, Matrix out, float* lse, ConstMatrix q, ConstMatrix k, ConstMatrix v,
             std::int64_t batch, std::int64_t kv_head, std::int64_t query_heads, float* at) {
  const ForwardScratch scratch(s, at);
  const std::int64_t first_row = batch * static_cast<std::int64_t>(s.sequence);
  pack_as_columns(head_of<T>(k, first_row, kv_head, s), s.sequence, s.head, scratch.keys);
  pack_as_depth(head_of<T>(v, first_row, kv_head, s), s.sequence, s.head, scratch.values);
  for (size_t g = 0; g < s.group; ++g) {
    const std::int64_t head = kv_head * static_cast<std::int64_t>(s.group) + static_cast<std::int64_t>(g);
    const auto queries = head_of<T>(q, first_row, head, s);
    const auto result = head_of<T>(out, first_row, head, s);
    float* lse_row = lse + (batch * query_heads + head) * static_cast<std::int64_t>(s.sequence);
    for (size_t q0 = 0; q0 < s.sequence; q0 += kQueries) {
      const size_t rows = std::min(kQueries, s.sequence - q0);
      pack_as_rows(queries, q0, rows, s.head, scratch.queries);
      std::fill_n(scratch.out, kQueries * s.head_padded, 0.0f);
      float maximum[kQueries], sum[kQueries];
      std::fill_n(maximum, kQueries, -std::numeric_limits<float>::infinity());
      std::fill_n(sum, kQueries, 0.0f);
      for (size_t k0 = 0; k0 < q0 + rows; k0 += kKeys) {
        const Tile tile{q0, rows, k0, std::min(kKeys, s.sequence - k0)};
        score_tile(tile, scratch.queries, scratch.keys, s.head, scratch.scores);
        for (size_t i = 0; i < rows; ++i) {
          float* row = scratch.scores + i * kKeys;
          const size_t count = tile.visible(i), cover = tile.visible_block(i / kTileRows * kTileRows);
          if (count == 0) {
            std::fill_n(row, cover, 0.0f);
            continue;
          }
          const float before = maximum[i];
          const float added = exponentials(row, count, cover, s.scale, maximum[i]);
          if (maximum[i] != before && k0 > 0) {
            const float fade = std::exp(before - maximum[i]);
            sum[i] *= fade;
            scale_row(scratch.out + i * s.head_padded, s.head_padded, fade);
          }
          sum[i] += added;
        }
        multiply_on(tile, scratch.scores, scratch.values, s.sequence, s.head_padded, s.head, scratch.out);
      }
      for (size_t i = 0; i < rows; ++i) {
        const VecF by = hn::Set(F32(), 1.0f / sum[i]);
        T* to = result.row(q0 + i);
        for_vectors(s.head, [&](size_t c, size_t n) HWY_ATTR {
          store(hn::Mul(load(scratch.out + i * s.head_padded + c), by), to + c, n);
        });
        lse_row[q0 + i] = maximum[i] + std::log(sum[i]);
      }
    }
  }
}

// In place: scores to probabilities, dscores to gradients of the unscaled scores. Zero where masked.
void probabilities_and_gradients(const Tile& tile, const float* lse, const float* delta, float scale,
                                 float* scores, float* dscores) {
  const F32 d;
  const size_t n = lanes(), width = round_up(tile.keys, tile_cols());
  for (size_t i = 0; i < tile.queries; ++i) {
    float *p = scores + i * kKeys, *g = dscores + i * kKeys;
    const size_t count = tile.visible(i);
    const VecF factor = hn::Set(d, scale), shift = hn::Set(d, lse[i]), less = hn::Set(d, delta[i]);
    size_t j = 0;
    for (; j + n <= count; j += n) {
      const VecF pj = exp(hn::MulSub(hn::LoadU(d, p + j), factor, shift));
      hn::StoreU(pj, d, p + j);
      hn::StoreU(hn::Mul(hn::Mul(pj, factor), hn::Sub(hn::LoadU(d, g + j), less)), d, g + j);
    }
    if (j < count) {
      const auto seen = hn::FirstN(d, count - j);
      const VecF pj = exp(hn::MulSub(hn::LoadU(d, p + j), factor, shift));
      const VecF gj = hn::Mul(hn::Mul(pj, factor), hn::Sub(hn::LoadU(d, g + j), less));
      hn::StoreU(hn::IfThenElseZero(seen, pj), d, p + j);
      hn::StoreU(hn::IfThenElseZero(seen, gj), d, g + j);
      j += n;
    }
    for (; j < width; j += n) {
      hn::StoreU(hn::Zero(d), d, p + j);
      hn::StoreU(hn::Zero(d), d, g + j);
    }
  }
}

template <class T>
void backward(const Sizes& s, Matrix dq, Matrix dk, Matrix dv, ConstMatrix dout, ConstMatrix out,
              const float* lse, ConstMatrix q, ConstMatrix k, ConstMatrix v, std::int64_t batch,
              std::int64_t kv_head, std::int64_t query_heads, float* at) {
  const BackwardScratch scratch(s, at);
  const std::int64_t first_row = batch * static_cast<std::int64_t>(s.sequence);
  const auto keys = head_of<T>(k, first_row, kv_head, s);
  pack_as_columns(keys, s.sequence, s.head, scratch.keys);
  pack_as_columns(head_of<T>(v, first_row, kv_head, s), s.sequence, s.head, scratch.values);
  pack_as_depth(keys, s.sequence, s.head, scratch.key_rows);
  std::fill_n(scratch.dkeys, s.keys_padded * s.head_padded, 0.0f);
  std::fill_n(scratch.dvalues, s.keys_padded * s.head_padded, 0.0f);
  for (size_t g = 0; g < s.group; ++g) {
    const std::int64_t head = kv_head * static_cast<std::int64_t>(s.group) + static_cast<std::int64_t>(g);
    const auto queries = head_of<T>(q, first_row, head, s);
    const auto results = head_of<T>(out, first_row, head, s);
    const auto douts = head_of<T>(dout, first_row, head, s);
    const float* lse_row = lse + (batch * query_heads + head) * static_cast<std::int64_t>(s.sequence);
    for (size_t q0 = 0; q0 < s.sequence; q0 += kQueries) {
      const size_t rows = std::min(kQueries, s.sequence - q0);
      pack_as_rows(queries, q0, rows, s.head, scratch.queries);
      pack_as_rows(douts, q0, rows, s.head, scratch.douts);
      // Panels are kQueries rows deep whatever `rows` is, so that offsets stay the same.
      const size_t width = tile_cols();
      for (size_t c = 0; c < s.head; c += width) {
        const size_t cols = std::min(width, s.head - c);
        pack_straight(queries.row(q0) + c, queries.stride, rows, cols, width,
                      scratch.query_rows + c * kQueries);
        pack_straight(douts.row(q0) + c, douts.stride, rows, cols, width, scratch.dout_rows + c * kQueries);
      }
      float delta[kQueries];
      for (size_t i = 0; i < rows; ++i) delta[i] = dot(douts.row(q0 + i), results.row(q0 + i), s.head);
      std::fill_n(scratch.dqueries, kQueries * s.head_padded, 0.0f);
      for (size_t k0 = 0; k0 < q0 + rows; k0 += kKeys) {
        const Tile tile{q0, rows, k0, std::min(kKeys, s.sequence - k0)};
        score_tile(tile, scratch.queries, scratch.keys, s.head, scratch.scores);
        score_tile(tile, scratch.douts, scratch.values, s.head, scratch.dscores);
        probabilities_and_gradients(tile, lse_row + q0, delta, s.scale, scratch.scores, scratch.dscores);
        multiply_on(tile, scratch.dscores, scratch.key_rows, s.sequence, s.head_padded, s.head,
                    scratch.dqueries);
        multiply_transposed(tile, scratch.scores, scratch.dout_rows, s.head_padded, s.head, scratch.dvalues);
        multiply_transposed(tile, scratch.dscores, scratch.query_rows, s.head_padded, s.head, scratch.dkeys);
      }
      write_rows(scratch.dqueries, s.head_padded, rows, s.head, head_of<T>(dq, first_row, head, s), q0);
    }
  }
  write_rows(scratch.dkeys, s.head_padded, s.sequence, s.head, head_of<T>(dk, first_row, kv_head, s), 0);
  write_rows(scratch.dvalues, s.head_padded, s.sequence, s.head, head_of<T>(dv, first_row, kv_head, s), 0);
}

}  // namespace

size_t ForwardFloats(const AttentionShape& shape, DType type) {
  if (use_dots(type)) return dots_forward_floats(Sizes(shape));
  return ForwardScratch(Sizes(shape), nullptr).carver.used();
}
size_t BackwardFloats(const AttentionShape& shape, DType type) {
  if (use_dots(type)) return dots_backward_floats(Sizes(shape));
  return BackwardScratch(Sizes(shape), nullptr).carver.used();
}

void AttentionForward(const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q, ConstMatrix k,
                      ConstMatrix v, std::int64_t batch, std::int64_t kv_head, float* scratch) {
  const auto call = use_dots(q.dtype)        ? dots_forward
                    : q.dtype == DType::bf16 ? forward<bf16>
                                             : forward<float>;
  call(Sizes(shape), out, lse, q, k, v, batch, kv_head, shape.query_heads, scratch);
}
void AttentionBackward(const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv, ConstMatrix dout,
                       ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k, ConstMatrix v,
                       std::int64_t batch, std::int64_t kv_head, float* scratch) {
  const auto call = use_dots(q.dtype)        ? dots_backward
                    : q.dtype == DType::bf16 ? backward<bf16>
                                             : backward<float>;
  call(Sizes(shape), dq, dk, dv, dout, out, lse, q, k, v, batch, kv_head, shape.query_heads, scratch);
}

}  // namespace HWY_NAMESPACE
}  // namespace strata::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::cpu {

HWY_EXPORT(ForwardFloats);
HWY_EXPORT(BackwardFloats);
HWY_EXPORT(AttentionForward);
HWY_EXPORT(AttentionBackward);

namespace kernels {

std::size_t attention_forward_scratch_floats(const AttentionShape& shape, DType type) {
  return HWY_DYNAMIC_DISPATCH(ForwardFloats)(shape, type);
}
std::size_t attention_backward_scratch_floats(const AttentionShape& shape, DType type) {
  return HWY_DYNAMIC_DISPATCH(BackwardFloats)(shape, type);
}
void attention_forward(const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q, ConstMatrix k,
                       ConstMatrix v, std::int64_t batch, std::int64_t key_value_head, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttentionForward)(shape, out, lse, q, k, v, batch, key_value_head, scratch);
}
void attention_backward(const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv, ConstMatrix dout,
                        ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k, ConstMatrix v,
                        std::int64_t batch, std::int64_t key_value_head, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttentionBackward)
  (shape, dq, dk, dv, dout, out, lse, q, k, v, batch, key_value_head, scratch);
}

}  // namespace kernels
}  // namespace strata::cpu
#endif
