// Flash attention, backward: dq, dk and dv from q, k, v, out, dout and the log-sum-exp of the forward pass.
//
// q, out, dq, dout (B*T, Hq*D), k, v, dk, dv (B*T, Hkv*D) bf16, lse and delta (B, Hq, T) fp32. With s = q k^T
// / sqrt(D), p = exp(s - lse), delta = sum(out * dout) of a row:
//   dv = p^T dout   dp = dout v^T   ds = p * (dp - delta)   dk = ds^T q / sqrt(D)   dq = ds k / sqrt(D)
//
// Two kernels, one after the other: by blocks of queries (delta, and dq: 3 products: s, dp, dq), then by
// blocks of keys (dk, dv: 4 products: s, dp, dv, dk). That is 7 products where 5 would do, 1.4 times the
// arithmetic, and the reason is determinism: with one pass over blocks of keys, dq is the sum of what
// different blocks find, in whatever order they end. Atomics make that differ from run to run; making blocks
// wait for each other in order leaves multiprocessors idle along the causal diagonal; and keeping the parts
// takes T/128 times the memory of dq in fp32. Here every sum stays in one warp's registers, in a fixed order:
// the same bits each time, no workspace but delta. For the same reason a block of keys goes through all query
// heads that share them, so dk and dv need no sum after.
//
// FLOPs: 7 products, 14 B Hq D T(T+1)/2. Memory: q, dout twice, out, dq, k, v, dk, dv once: 2 bytes each
// element; k and v once more for each 128 queries, q and dout once more for each 128 keys, mostly from L2.
//
// What the two kernels share. A tile that stays (128 rows of two matrices) and a ring of two stages of what
// is walked over, each stage on its way while the one before is multiplied; one barrier a stage. A warp holds
// whole rows of scores, 16 (or 32 where registers allow), in the accumulator layout, rows being queries in
// one and keys in the other kernel; so p and ds are A operands of the next products without a trip through
// shared memory, at the price of more ldmatrix: for each 16x16 block brought to a warp (4 cycles of shared
// memory) 2 mma (4 cycles of an A100's tensor cores). At D = 128 the keys' kernel needs 128 registers for dk
// and dv, 64 for scores and their gradients.
#include "cuda/check.h"
#include "cuda/kernels/attention_launch.h"
#include "cuda/kernels/attention_tiles.cuh"

namespace strata::gpu::flash {
namespace {

struct BackwardArguments {
  View<Element> dq, dk, dv;
  View<const Element> dout, out, q, k, v;
  const float* lse;
  float* delta;
  AttentionSizes sizes;
};

// ---- by blocks of queries: dq ----

// At D <= 64 a warp holds 32 rows (64 registers for dq at D = 64, 64 for scores against 32 keys and their
// gradients), and two blocks of 4 warps fit an SM. At D = 256 queries and their gradients take 128 KiB, which
// leaves 32 for the ring: 16 keys a stage.
template <int D>
struct QueryTiles {
  static constexpr int row_blocks = D <= 64 ? 2 : 1;  // 16-row blocks a warp
  static constexpr int warps = D <= 64 ? 4 : 8;
  static constexpr int queries = 16 * row_blocks * warps;
  static constexpr int keys = D == 64 ? 32 : D <= 128 ? 64 : 16;
  static constexpr int threads = warps * warp_size;
  static constexpr int blocks_per_sm = D <= 64 ? 2 : 1;
  static constexpr int stage = 2 * keys * D;  // elements: keys, then values
  static constexpr std::size_t shared_bytes = sizeof(Element) * (2 * queries * D + 2 * stage);
};

// Sum of out * dout over row `row`, for the four lanes of a row of an accumulator together: 0 past the end.
template <int D>
__device__ __forceinline__ float row_delta(const HeadRows<const Element>& out,
                                           const HeadRows<const Element>& dout, int row, int end, int lane) {
  float sum = 0;
  if (row < end) {
#pragma unroll
    for (int chunk = lane % 4; chunk < D / 8; chunk += 4) {
      const Vec<Element> a = load_vec(out.row(row) + chunk * 8), b = load_vec(dout.row(row) + chunk * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fmaf_rn(__bfloat162float(a[i]), __bfloat162float(b[i]), sum);
    }
  }
  return sum_of_row(sum);
}

template <int D>
__global__ void __launch_bounds__(QueryTiles<D>::threads, QueryTiles<D>::blocks_per_sm)
    attention_queries_kernel(BackwardArguments args) {
  using Tiles = QueryTiles<D>;
  constexpr int M = Tiles::row_blocks;
  constexpr int key_blocks = Tiles::keys / 16;
  const int warp = static_cast<int>(threadIdx.x / warp_size),
            lane = static_cast<int>(threadIdx.x % warp_size);
  const AttentionSizes& sizes = args.sizes;
  const int sequence = sizes.sequence, head = static_cast<int>(blockIdx.x) % sizes.query_heads;
  const std::int64_t batch = static_cast<int>(blockIdx.x) / sizes.query_heads;
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Tiles::queries;
  const int first_row = first_query + warp * 16 * M, last_row = first_row + 16 * M - 1;

  DYN_SMEM(Element, queries);                           // [Tiles::queries][D]
  Element* const douts = queries + Tiles::queries * D;  // [Tiles::queries][D]
  Element* const ring = douts + Tiles::queries * D;     // [2]{K [Tiles::keys][D], V the same}
  const HeadRows<const Element> q = args.q.head<D>(batch, head, sequence);
  const HeadRows<const Element> dout = args.dout.head<D>(batch, head, sequence);
  const HeadRows<const Element> out = args.out.head<D>(batch, head, sequence);
  RowCopy<D, Tiles::threads> k(args.k.head<D>(batch, head / sizes.group, sequence), 0);
  RowCopy<D, Tiles::threads> v(args.v.head<D>(batch, head / sizes.group, sequence), 0);

  const int seen = min(sequence, first_query + Tiles::queries);  // keys that the block needs
  const auto start_copy = [&](int stage, int first_key) {
    if (first_key < seen) {
      Element* const keys = ring + stage * Tiles::stage;
      k.template next<Tiles::keys>(keys, sequence - first_key);
      v.template next<Tiles::keys>(keys + Tiles::keys * D, sequence - first_key);
    }
    cp_async_commit();
  };
  copy_rows<D, Tiles::queries, Tiles::threads>(queries, q, first_query, sequence);
  copy_rows<D, Tiles::queries, Tiles::threads>(douts, dout, first_query, sequence);
  start_copy(0, 0);

  float delta[M][2], lse_log2[M][2];
  const std::int64_t statistics = (batch * sizes.query_heads + head) * sequence;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
      delta[m][half] = row_delta<D>(out, dout, row, sequence, lane);
      lse_log2[m][half] = row < sequence ? args.lse[statistics + row] * log2_e : 0.0f;
      if (lane % 4 == 0 && row < sequence) args.delta[statistics + row] = delta[m][half];
    }
  }

  float dq[M][D / 8][4];
  set_zero(dq);
  Element* const own_queries = queries + warp * 16 * M * D;
  const Element* const own_douts = douts + warp * 16 * M * D;
  const float scale_log2 = sizes.scale * log2_e;

  for (int first_key = 0, stage = 0; first_key < seen; first_key += Tiles::keys, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    start_copy(stage ^ 1, first_key + Tiles::keys);
    if (first_key > last_row) continue;  // the same for the whole warp
    const Element* const keys = ring + stage * Tiles::stage;
    float scores[M][2 * key_blocks][4], gradients[M][2 * key_blocks][4];
    set_zero(scores);
    add_product_of_rows<D, M, key_blocks>(scores, own_queries, keys, lane);
    set_zero(gradients);
    add_product_of_rows<D, M, key_blocks>(gradients, own_douts, keys + Tiles::keys * D, lane);
    if (first_key + Tiles::keys - 1 > first_row) hide_future_columns(scores, first_row, first_key, lane);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * key_blocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = exp2_approx(__fmaf_rn(scores[m][n][i], scale_log2, -lse_log2[m][i / 2]));
          gradients[m][n][i] = p * (gradients[m][n][i] - delta[m][i / 2]);
        }
      }
    }
    std::uint32_t operands[M][key_blocks][4];
    to_operands(operands, gradients);
    add_product<D, M, key_blocks, D / 16>(dq, operands, keys, lane);
  }

  // The warp's own queries are not needed any more.
  scale_by(dq, sizes.scale);
  store_rows<D>(args.dq.head<D>(batch, head, sequence), first_row, sequence, 0, own_queries, dq, lane);
}

// ---- by blocks of keys: dk and dv ----

// At D <= 64 a warp holds 32 keys (128 registers for dk and dv, 64 for scores against 32 queries and their
// gradients) and two blocks of 4 warps fit an SM. At D = 256 dk and dv of 16 keys would take 256 registers:
// two warps share 16 keys, each forms the scores against half of the queries, they exchange them through
// shared memory, and each sums half of the columns of dk and dv.
template <int D>
struct KeyTiles {
  static constexpr int row_blocks = D <= 64 ? 2 : 1;
  static constexpr int warps = D <= 64 ? 4 : 8;
  static constexpr int shares = D <= 128 ? 1 : 2;  // warps to the same keys
  static constexpr int keys = 16 * row_blocks * warps / shares;
  static constexpr int queries = D > 64 && D <= 128 ? 64 : 32;
  static constexpr int threads = warps * warp_size;
  static constexpr int blocks_per_sm = D <= 64 ? 2 : 1;
  static constexpr int stage =
      2 * queries * D + 4 * queries;  // elements: q, dout, then lse and delta in fp32
  static constexpr int exchange = shares > 1 ? 2 * keys* queries : 0;
  static constexpr std::size_t shared_bytes = sizeof(Element) * (2 * keys * D + 2 * stage + exchange);
};

template <int D>
__global__ void __launch_bounds__(KeyTiles<D>::threads, KeyTiles<D>::blocks_per_sm)
    attention_keys_kernel(BackwardArguments args) {
  using Tiles = KeyTiles<D>;
  constexpr int M = Tiles::row_blocks;
  constexpr int query_blocks = Tiles::queries / 16;               // of a stage
  constexpr int own_query_blocks = query_blocks / Tiles::shares;  // whose scores this warp forms
  constexpr int own_steps = D / 16 / Tiles::shares;  // 16-column blocks of dk and dv that it sums
  const int warp = static_cast<int>(threadIdx.x / warp_size),
            lane = static_cast<int>(threadIdx.x % warp_size);
  const int share = warp % Tiles::shares, own_key = warp / Tiles::shares * 16 * M;
  const int own_column = share * 16 * own_steps;
  const AttentionSizes& sizes = args.sizes;
  const int sequence = sizes.sequence, key_head = static_cast<int>(blockIdx.x) % sizes.key_value_heads;
  const std::int64_t batch = static_cast<int>(blockIdx.x) / sizes.key_value_heads;
  const int first_key = static_cast<int>(blockIdx.y) * Tiles::keys;
  const int first_row = first_key + own_key, last_row = first_row + 16 * M - 1;

  DYN_SMEM(Element, keys);                            // [Tiles::keys][D]
  Element* const values = keys + Tiles::keys * D;     // [Tiles::keys][D]
  Element* const ring = values + Tiles::keys * D;     // [2]{q [Tiles::queries][D], dout the same, lse, delta}
  Element* const exchange = ring + 2 * Tiles::stage;  // {p, ds} [Tiles::keys][Tiles::queries]
  copy_rows<D, Tiles::keys, Tiles::threads>(keys, args.k.head<D>(batch, key_head, sequence), first_key,
                                            sequence);
  copy_rows<D, Tiles::keys, Tiles::threads>(values, args.v.head<D>(batch, key_head, sequence), first_key,
                                            sequence);

  // What is walked over: for each query head of the group, the tiles of queries that see any of the keys.
  const int first_tile = first_key / Tiles::queries;
  const int tiles = (sequence + Tiles::queries - 1) / Tiles::queries - first_tile;
  const int steps = sizes.group * tiles;
  const auto query_of_step = [&](int step) { return (first_tile + step % tiles) * Tiles::queries; };
  const auto start_copy = [&](int stage, int step) {
    if (step < steps) {
      const int head = key_head * sizes.group + step / tiles, first_query = query_of_step(step);
      Element* const queries = ring + stage * Tiles::stage;
      Element* const douts = queries + Tiles::queries * D;
      copy_rows<D, Tiles::queries, Tiles::threads>(queries, args.q.head<D>(batch, head, sequence),
                                                   first_query, sequence);
      copy_rows<D, Tiles::queries, Tiles::threads>(douts, args.dout.head<D>(batch, head, sequence),
                                                   first_query, sequence);
      if (const int thread = static_cast<int>(threadIdx.x); thread < 2 * Tiles::queries) {
        float* const statistics = reinterpret_cast<float*>(douts + Tiles::queries * D);
        const float* const source =
            (thread < Tiles::queries ? args.lse : args.delta) + (batch * sizes.query_heads + head) * sequence;
        const int query = first_query + thread % Tiles::queries;
        const bool exists = query < sequence;
        cp_async<4>(statistics + thread, source + (exists ? query : first_query), exists ? 4 : 0);
      }
    }
    cp_async_commit();
  };
  start_copy(0, 0);

  float dk[M][2 * own_steps][4], dv[M][2 * own_steps][4];
  set_zero(dk);
  set_zero(dv);
  const float scale_log2 = sizes.scale * log2_e;

  for (int step = 0, stage = 0; step < steps; ++step, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    start_copy(stage ^ 1, step + 1);
    const int first_query = query_of_step(step);
    const bool visible = first_query + Tiles::queries > first_row;  // the same for all warps of the same keys
    const Element* const queries = ring + stage * Tiles::stage;
    const Element* const douts = queries + Tiles::queries * D;
    std::uint32_t p_operands[M][query_blocks][4], ds_operands[M][query_blocks][4];
    if (visible) {
      const int own_query = share * 16 * own_query_blocks;
      const float* const lse = reinterpret_cast<const float*>(douts + Tiles::queries * D) + own_query;
      const float* const delta = lse + Tiles::queries;
      float p[M][2 * own_query_blocks][4], ds[M][2 * own_query_blocks][4];
      set_zero(p);
      add_product_of_rows<D, M, own_query_blocks>(p, keys + own_key * D, queries + own_query * D, lane);
      set_zero(ds);
      add_product_of_rows<D, M, own_query_blocks>(ds, values + own_key * D, douts + own_query * D, lane);
      if (first_query < last_row) hide_future_rows(p, first_row, first_query + own_query, lane);
#pragma unroll
      for (int n = 0; n < 2 * own_query_blocks; ++n) {
        const int column = 8 * n + 2 * (lane % 4);
        const float2 lse_pair = *reinterpret_cast<const float2*>(lse + column);
        const float2 delta_pair = *reinterpret_cast<const float2*>(delta + column);
        const float lse_log2[2] = {lse_pair.x * log2_e, lse_pair.y * log2_e};
        const float less[2] = {delta_pair.x, delta_pair.y};
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            p[m][n][i] = exp2_approx(__fmaf_rn(p[m][n][i], scale_log2, -lse_log2[i % 2]));
            ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - less[i % 2]);
          }
        }
      }
      if constexpr (Tiles::shares == 1) {
        to_operands(p_operands, p);
        to_operands(ds_operands, ds);
      } else {
        Element* const own = exchange + own_key * Tiles::queries;
        write_tile<Tiles::queries>(own, share * 2 * own_query_blocks, p, lane);
        write_tile<Tiles::queries>(own + Tiles::keys * Tiles::queries, share * 2 * own_query_blocks, ds,
                                   lane);
      }
    }
    if constexpr (Tiles::shares > 1) {
      __syncthreads();
      if (visible) {
        const Element* const own = exchange + own_key * Tiles::queries;
        read_operands<Tiles::queries>(p_operands, own, lane);
        read_operands<Tiles::queries>(ds_operands, own + Tiles::keys * Tiles::queries, lane);
      }
    }
    if (visible) {
      add_product<D, M, query_blocks, own_steps>(dv, p_operands, douts + own_column, lane);
      add_product<D, M, query_blocks, own_steps>(dk, ds_operands, queries + own_column, lane);
    }
  }

  // Keys and values are not needed any more, once every warp that shares them has come here.
  if constexpr (Tiles::shares > 1) __syncthreads();
  scale_by(dk, sizes.scale);
  store_rows<D>(args.dk.head<D>(batch, key_head, sequence), first_row, sequence, own_column / 8,
                keys + own_key * D, dk, lane);
  store_rows<D>(args.dv.head<D>(batch, key_head, sequence), first_row, sequence, own_column / 8,
                values + own_key * D, dv, lane);
}

unsigned tiles_of(std::int64_t sequence, int rows) {
  return static_cast<unsigned>((sequence + rows - 1) / rows);
}

template <int D>
void launch(cudaStream_t stream, const AttentionShape& shape, const BackwardArguments& args) {
  using Queries = QueryTiles<D>;
  using Keys = KeyTiles<D>;
  const dim3 query_grid(static_cast<unsigned>(shape.batch * shape.query_heads),
                        tiles_of(shape.sequence, Queries::queries));
  STRATA_CUDA(allow_shared_bytes(attention_queries_kernel<D>, Queries::shared_bytes));
  GPU_LAUNCH((attention_queries_kernel<D>), query_grid, Queries::threads, Queries::shared_bytes, stream,
             args);
  STRATA_CUDA(cudaGetLastError());
  const dim3 key_grid(static_cast<unsigned>(shape.batch * shape.key_value_heads),
                      tiles_of(shape.sequence, Keys::keys));
  STRATA_CUDA(allow_shared_bytes(attention_keys_kernel<D>, Keys::shared_bytes));
  GPU_LAUNCH((attention_keys_kernel<D>), key_grid, Keys::threads, Keys::shared_bytes, stream, args);
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace

void backward(cudaStream_t stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
              ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
              ConstMatrix v, float* delta) {
  const BackwardArguments args{
      view(dq), view(dk), view(dv), view(dout),           view(out), view(q), view(k),
      view(v),  lse,      delta,    AttentionSizes(shape)};
  with_head_size(shape.head_size, [&](auto d) { launch<d>(stream, shape, args); });
}

}  // namespace strata::gpu::flash
