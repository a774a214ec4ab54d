// Flash attention, forward: out = softmax(q k^T / sqrt(D), causal) v and the log-sum-exp of each row.
//
// q, out (B*T, Hq*D), k, v (B*T, Hkv*D) bf16, lse (B, Hq, T) fp32.
// Arithmetic: 2 products, 4 B Hq D T(T+1)/2 FLOPs. Memory: q, out, lse once, 4 B T Hq D + 4 B Hq T bytes; k
// and v of a head once for each block of 128 queries that sees them, from L2 but for the first time.
//
// A block takes 128 queries of one head and walks over the keys that they see, 64 or 48 at a time.
//  - A warp holds 32 rows (D <= 128), so that each 16x16 block of keys or values that ldmatrix brings
//    (4 cycles of shared memory) feeds 4 mma (8 cycles of an A100's tensor cores); with 16 rows the two would
//    be even.
//    That takes D registers for the output and one for each key of the tile: at D = 128, 48 keys are what 255
//    registers hold without spilling. At D = 256 the output of 16 rows takes 128: 8 warps of 16 rows.
//  - 4 warps a block and 68 KiB of shared memory at D = 128 (32 of queries, a ring of three tiles of 12)
//    leave room for a second block, whose products run while the first computes exponentials.
//  - Tiles of keys and values alternate in the ring: while one is multiplied, the next two are on their way.
//    One barrier a tile: it says both that the tile has come and that the one before it, whose place the next
//    copy takes, is done with.
//  - So few keys also keep what causality wastes small: a warp skips tiles wholly to the right of its rows,
//    and computes about 32 keys a row in vain, where 1024 are needed on average at T = 2048.
// Blocks are ordered by falling work, the last queries first, over all heads and sequences.
#include "cuda/check.h"
#include "cuda/kernels/attention_launch.h"
#include "cuda/kernels/attention_tiles.cuh"

namespace strata::gpu::flash {
namespace {

template <int D>
struct ForwardTiles {
  static constexpr int row_blocks = D <= 128 ? 2 : 1;  // 16-row blocks a warp
  static constexpr int warps = D <= 128 ? 4 : 8;
  static constexpr int queries = 16 * row_blocks * warps;
  static constexpr int keys = D == 128 ? 48 : 64;
  static constexpr int ring = 3;
  static constexpr int threads = warps * warp_size;
  static constexpr int blocks_per_sm = D <= 128 ? 2 : 1;
  static constexpr std::size_t shared_bytes = sizeof(Element) * D * (queries + ring * keys);
};

struct ForwardArguments {
  View<Element> out;
  View<const Element> q, k, v;
  float* lse;
  AttentionSizes sizes;
};

// Maximum and sum of exponentials of the rows g and g + 8 of each block, as far as a warp has come.
template <int M>
struct SoftmaxState {
  float maximum[M][2];  // of the scores before scaling
  float sum[M][2];      // this lane's columns only
};

// Scores of one tile to probabilities relative to the running maximum; fades what was summed before.
template <int M, int N, int K>
__device__ __forceinline__ void online_softmax(float (&s)[M][N][4], float (&out)[M][K][4],
                                               SoftmaxState<M>& state, float scale_log2) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = state.maximum[m][half];
      float most = before;
#pragma unroll
      for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      most = max_of_row(most);
      // Nothing but -inf so far: any finite shift gives zeros where -inf minus -inf would give NaN.
      const float shift = most == -INFINITY ? 0.0f : most * scale_log2;
      const float fade = exp2_approx(__fmaf_rn(before, scale_log2, -shift));
      float sum = state.sum[m][half] * fade;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[m][n][i] = exp2_approx(__fmaf_rn(s[m][n][i], scale_log2, -shift));
          sum += s[m][n][i];
        }
      }
#pragma unroll
      for (int n = 0; n < K; ++n) out[m][n][2 * half] *= fade, out[m][n][2 * half + 1] *= fade;
      state.maximum[m][half] = most;
      state.sum[m][half] = sum;
    }
  }
}

template <int D>
__global__ void __launch_bounds__(ForwardTiles<D>::threads, ForwardTiles<D>::blocks_per_sm)
    attention_forward_kernel(ForwardArguments args) {
  using Tiles = ForwardTiles<D>;
  constexpr int M = Tiles::row_blocks;
  constexpr int key_blocks = Tiles::keys / 16, tile_size = Tiles::keys * D;
  const int warp = static_cast<int>(threadIdx.x / warp_size),
            lane = static_cast<int>(threadIdx.x % warp_size);
  const AttentionSizes& sizes = args.sizes;
  const int sequence = sizes.sequence, head = static_cast<int>(blockIdx.x) % sizes.query_heads;
  const std::int64_t batch = static_cast<int>(blockIdx.x) / sizes.query_heads;
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Tiles::queries;
  const int first_row = first_query + warp * 16 * M, last_row = first_row + 16 * M - 1;

  DYN_SMEM(Element, queries);                          // [Tiles::queries][D]
  Element* const ring = queries + Tiles::queries * D;  // [3][Tiles::keys][D]: K0 V0 K1 V1 ...
  const HeadRows<const Element> q = args.q.head<D>(batch, head, sequence);
  RowCopy<D, Tiles::threads> k(args.k.head<D>(batch, head / sizes.group, sequence), 0);
  RowCopy<D, Tiles::threads> v(args.v.head<D>(batch, head / sizes.group, sequence), 0);

  const int seen = min(sequence, first_query + Tiles::queries);  // keys that the block needs
  Element* tile = ring;                                          // what is multiplied next
  const auto advance = [&] { tile = tile == ring + (Tiles::ring - 1) * tile_size ? ring : tile + tile_size; };
  // Two tiles ahead, into the place of the one before. Always commits, so that the number of groups in flight
  // stays known.
  const auto start_copy = [&](RowCopy<D, Tiles::threads>& source, int first_key) {
    Element* const landing = tile == ring ? ring + (Tiles::ring - 1) * tile_size : tile - tile_size;
    if (first_key < seen) source.template next<Tiles::keys>(landing, sequence - first_key);
    cp_async_commit();
  };

  copy_rows<D, Tiles::queries, Tiles::threads>(queries, q, first_query, sequence);
  k.template next<Tiles::keys>(ring, sequence);
  cp_async_commit();
  v.template next<Tiles::keys>(ring + tile_size, sequence);
  cp_async_commit();

  float out[M][D / 8][4];
  set_zero(out);
  SoftmaxState<M> state;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    state.maximum[m][0] = state.maximum[m][1] = -INFINITY;
    state.sum[m][0] = state.sum[m][1] = 0;
  }
  Element* const own_queries = queries + warp * 16 * M * D;
  const float scale_log2 = sizes.scale * log2_e;

  for (int first_key = 0; first_key < seen; first_key += Tiles::keys) {
    const bool visible = first_key <= last_row;  // the same for the whole warp
    cp_async_wait<1>();
    __syncthreads();
    start_copy(k, first_key + Tiles::keys);
    std::uint32_t probabilities[M][key_blocks][4];
    if (visible) {
      float scores[M][2 * key_blocks][4];
      set_zero(scores);
      add_product_of_rows<D, M, key_blocks>(scores, own_queries, tile, lane);
      if (first_key + Tiles::keys - 1 > first_row) hide_future_columns(scores, first_row, first_key, lane);
      online_softmax(scores, out, state, scale_log2);
      to_operands(probabilities, scores);
    }
    advance();

    cp_async_wait<1>();
    __syncthreads();
    start_copy(v, first_key + Tiles::keys);
    if (visible) add_product<D, M, key_blocks, D / 16>(out, probabilities, tile, lane);
    advance();
  }

  float inverse[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(state.sum[m][half]);
      inverse[m][half] = 1.0f / sum;
      const int row = first_row + 16 * m + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < sequence) {
        args.lse[(batch * sizes.query_heads + head) * sequence + row] =
            __fmaf_rn(state.maximum[m][half], sizes.scale, logf(sum));
      }
    }
  }
  // The warp's own queries are not needed any more.
  scale_rows(out, inverse);
  store_rows<D>(args.out.head<D>(batch, head, sequence), first_row, sequence, 0, own_queries, out, lane);
}

template <int D>
void launch(cudaStream_t stream, const AttentionShape& shape, const ForwardArguments& args) {
  using Tiles = ForwardTiles<D>;
  const dim3 grid(static_cast<unsigned>(shape.batch * shape.query_heads),
                  static_cast<unsigned>((shape.sequence + Tiles::queries - 1) / Tiles::queries));
  STRATA_CUDA(allow_shared_bytes(attention_forward_kernel<D>, Tiles::shared_bytes));
  GPU_LAUNCH((attention_forward_kernel<D>), grid, Tiles::threads, Tiles::shared_bytes, stream, args);
  STRATA_CUDA(cudaGetLastError());
}

}  // namespace

void forward(cudaStream_t stream, const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q,
             ConstMatrix k, ConstMatrix v) {
  const ForwardArguments args{view(out), view(q), view(k), view(v), lse, AttentionSizes(shape)};
  with_head_size(shape.head_size, [&](auto d) { launch<d>(stream, shape, args); });
}

}  // namespace strata::gpu::flash
