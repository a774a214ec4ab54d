// What the flash attention kernels share: swizzled tiles in shared memory, copies into them, and products of
// 16-row blocks that a warp forms from them.
//
// A warp's block of a product is kept in the accumulator layout of mma m16n8k16: with g = lane / 4 and
// t = lane % 4, d[n][0..1] are row g, columns 8n + 2t and its right neighbour; d[n][2..3] the same of row
// g + 8. Two neighbouring accumulator tiles, rounded to bf16, are exactly the A operand of a product over
// their columns, so probabilities go from one product into the next without leaving registers.
#pragma once

#include "cuda/kernels/gpu.h"

#include <bit>
#include <cmath>
#include <type_traits>

#include "backend/tensor.h"

namespace strata::gpu::flash {

using Element = __nv_bfloat16;

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;

// Head sizes with an instance of the kernels: f(std::integral_constant<int, D>{}). Returns whether there is
// one.
template <typename F>
bool with_head_size(std::int64_t head_size, F&& f) {
  switch (head_size) {
    case 32:
      f(std::integral_constant<int, 32>{});
      return true;
    case 64:
      f(std::integral_constant<int, 64>{});
      return true;
    case 80:
      f(std::integral_constant<int, 80>{});
      return true;
    case 96:
      f(std::integral_constant<int, 96>{});
      return true;
    case 128:
      f(std::integral_constant<int, 128>{});
      return true;
    case 256:
      f(std::integral_constant<int, 256>{});
      return true;
    default:
      return false;
  }
}

// One head's matrix of one sequence: rows are tokens, `stride` elements apart.
template <typename T>
struct HeadRows {
  T* data;
  std::int64_t stride;
  __device__ __forceinline__ T* row(std::int64_t r) const { return data + r * stride; }
};

// A kernel argument: a matrix (B*T, heads*D).
template <typename T>
struct View {
  T* data;
  std::int64_t stride;
  // Head `head` of sequence `batch`.
  template <int D>
  __device__ __forceinline__ HeadRows<T> head(std::int64_t batch, int head, int sequence) const {
    return {data + batch * sequence * stride + std::int64_t{head} * D, stride};
  }
};

inline View<Element> view(const Matrix& x) {
  return {static_cast<Element*>(x.data), x.stride};
}
inline View<const Element> view(const ConstMatrix& x) {
  return {static_cast<const Element*>(x.data), x.stride};
}

// ---- tiles: rows of D elements without padding, their 16-byte chunks permuted ----
//
// ldmatrix reads the same chunk of 8 neighbouring rows at once, which must lie in 8 different groups of four
// banks. A row has D/8 chunks; rows whose distance times D/8 is a multiple of 8 would collide, and there are
// `swizzle_rows` of those among 8. Each gets its chunks permuted by an exclusive or of its own. Writes of
// neighbouring chunks by neighbouring threads stay free of conflicts, since only the order within aligned
// groups of swizzle_rows chunks changes.
template <int D>
struct Tile {
  static_assert(D % 16 == 0);
  static constexpr int chunks = D / 8;
  static constexpr int swizzle_rows = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;
  static __device__ __forceinline__ int swizzle(int row) { return row / (8 / swizzle_rows) % swizzle_rows; }
  // The place of a chunk, in elements.
  static __device__ __forceinline__ int at(int row, int chunk) {
    return row * D + (chunk ^ swizzle(row)) * 8;
  }
};

// Threads for a row of `chunks` chunks: a power of two, so that a thread keeps its column and its permutation
// from row to row. At 80 and 96 some of them have nothing to do.
template <int Chunks>
inline constexpr int row_threads = static_cast<int>(std::bit_ceil(static_cast<unsigned>(Chunks)));

// This thread's part in copying the rows of a matrix from one on, some at a time, into tiles.
template <int D, int Threads>
class RowCopy {
 public:
  __device__ __forceinline__ RowCopy(const HeadRows<const Element>& source, int first)
      : from_(source.row(first + row()) + chunk() * 8), stride_(source.stride) {}

  // Starts copying the next Count rows; those from `rows_left` on do not exist and become zeros.
  template <int Count>
  __device__ __forceinline__ void next(Element* tile, int rows_left) {
    static_assert(rows_at_once % 8 == 0 && Count % rows_at_once == 0);
    if (chunk() >= Tile<D>::chunks) return;
    Element* const to = tile + Tile<D>::at(row(), chunk());
#pragma unroll
    for (int i = 0; i < Count; i += rows_at_once) {
      cp_async<16>(to + i * D, from_, row() + i < rows_left ? 16 : 0);
      from_ += rows_at_once * stride_;
    }
  }

 private:
  static constexpr int width = row_threads<Tile<D>::chunks>, rows_at_once = Threads / width;
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x / width);
  }
  static __device__ __forceinline__ int chunk() {
    return static_cast<int>(threadIdx.x % width);
  }

  const Element* from_;
  std::int64_t stride_;
};

// Starts copying Count rows from `first` on into a tile; rows at or past `end` become zeros.
template <int D, int Count, int Threads>
__device__ __forceinline__ void copy_rows(Element* tile, const HeadRows<const Element>& source, int first,
                                          int end) {
  RowCopy<D, Threads>(source, first).template next<Count>(tile, end - first);
}

// The row of a 16x16 block that this lane hands to ldmatrix. at(r, s): in elements, of the block whose first
// row is r (a multiple of 8) and whose first column is 16 s.
template <int D>
struct LaneRow {
  int offset;
  int chunk;
  __device__ __forceinline__ int at(int row, int step) const {
    // Only the low bits of a chunk are permuted: what lies above them is an offset known to the compiler.
    constexpr int permuted = Tile<D>::swizzle_rows;
    return row * D + offset + (chunk ^ 2 * step % permuted) * 8 + 2 * step / permuted * permuted * 8;
  }
};
// Lanes 0-15 give the left halves of the block's rows, 16-31 the right halves, so that registers 0 and 1 get
// the upper and lower left 8x8 tiles, 2 and 3 the right ones. All operands are read like this (one set of
// addresses serves them all); which two registers make a B operand depends on whether its rows or its columns
// are the summed index.
template <int D>
__device__ __forceinline__ LaneRow<D> lane_row(int lane) {
  return {lane % 16 * D, (lane / 16) ^ Tile<D>::swizzle(lane % 16)};
}

// ---- products of a warp ----

// d (16 M, 16 N) += a b^T over D columns; a and b point to the first of 16 M and 16 N rows of their tiles.
template <int D, int M, int N>
__device__ __forceinline__ void add_product_of_rows(float (&d)[M][2 * N][4], const Element* a,
                                                    const Element* b, int lane) {
  const LaneRow<D> own = lane_row<D>(lane);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    std::uint32_t left[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ldmatrix_x4(left[m][0], left[m][1], left[m][2], left[m][3], a + own.at(16 * m, step));
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      std::uint32_t right[4];
      ldmatrix_x4(right[0], right[1], right[2], right[3], b + own.at(16 * n, step));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_bf16(d[m][2 * n], left[m], right[0], right[2]);
        mma_bf16(d[m][2 * n + 1], left[m], right[1], right[3]);
      }
    }
  }
}

// d (16 M, 16 N) += a b with a (16 M, 16 K) in registers and b 16 K rows of a tile. b may point to a column
// that is a multiple of 64.
template <int D, int M, int K, int N>
__device__ __forceinline__ void add_product(float (&d)[M][2 * N][4], const std::uint32_t (&a)[M][K][4],
                                            const Element* b, int lane) {
  const LaneRow<D> own = lane_row<D>(lane);
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      std::uint32_t right[4];
      ldmatrix_x4_trans(right[0], right[1], right[2], right[3], b + own.at(16 * k, n));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_bf16(d[m][2 * n], a[m][k], right[0], right[1]);
        mma_bf16(d[m][2 * n + 1], a[m][k], right[2], right[3]);
      }
    }
  }
}

// Accumulators as A operands: columns of d become the summed index.
template <int M, int K>
__device__ __forceinline__ void to_operands(std::uint32_t (&a)[M][K][4], const float (&d)[M][2 * K][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[m][k][2 * half] = pack_bf16x2(d[m][2 * k + half][0], d[m][2 * k + half][1]);
        a[m][k][2 * half + 1] = pack_bf16x2(d[m][2 * k + half][2], d[m][2 * k + half][3]);
      }
    }
  }
}

template <int M, int N>
__device__ __forceinline__ void set_zero(float (&d)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] = 0;
    }
  }
}

// Hides from token first_row + i what lies in its future: scores of rows (queries) against columns (keys),
// and their transpose. M 16-row blocks from first_row on, N 8-column tiles from first_column on.
template <int M, int N>
__device__ __forceinline__ void hide_future_columns(float (&scores)[M][N][4], int first_row, int first_column,
                                                    int lane) {
  const int ahead = first_column + 2 * (lane % 4) - (first_row + lane / 4);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (ahead + 8 * n + i % 2 - 16 * m - i / 2 * 8 > 0) scores[m][n][i] = -INFINITY;
      }
    }
  }
}
template <int M, int N>
__device__ __forceinline__ void hide_future_rows(float (&scores)[M][N][4], int first_row, int first_column,
                                                 int lane) {
  const int ahead = first_row + lane / 4 - (first_column + 2 * (lane % 4));
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (ahead + 16 * m + i / 2 * 8 - 8 * n - i % 2 > 0) scores[m][n][i] = -INFINITY;
      }
    }
  }
}

// Reductions over the four lanes that hold one row of an accumulator.
__device__ __forceinline__ float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(full_warp, x, 1));
  return fmaxf(x, __shfl_xor_sync(full_warp, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(full_warp, x, 1);
  return x + __shfl_xor_sync(full_warp, x, 2);
}

// d (16 M, 8 N), the rows g and g + 8 of each block times by[m][0] and by[m][1].
template <int M, int N>
__device__ __forceinline__ void scale_rows(float (&d)[M][N][4], const float (&by)[M][2]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] *= by[m][i / 2];
    }
  }
}
template <int M, int N>
__device__ __forceinline__ void scale_by(float (&d)[M][N][4], float by) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] *= by;
    }
  }
}

// ---- accumulators to and from memory ----

// Rounds d (16 M, 8 N) to bf16 into 16 M rows of a tile, columns from 8 `chunk` on.
template <int D, int M, int N>
__device__ __forceinline__ void write_tile(Element* tile, int chunk, const float (&d)[M][N][4], int lane) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t pair = pack_bf16x2(d[m][n][2 * half], d[m][n][2 * half + 1]);
        Element* const at = tile + Tile<D>::at(16 * m + 8 * half + lane / 4, chunk + n) + 2 * (lane % 4);
        *reinterpret_cast<std::uint32_t*>(at) = pair;
      }
    }
  }
}

// A operands (16 M, 16 K) from a tile's first 16 M rows.
template <int D, int M, int K>
__device__ __forceinline__ void read_operands(std::uint32_t (&a)[M][K][4], const Element* tile, int lane) {
  const LaneRow<D> own = lane_row<D>(lane);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      ldmatrix_x4(a[m][k][0], a[m][k][1], a[m][k][2], a[m][k][3], tile + own.at(16 * m, k));
    }
  }
}

// Writes d (16 M, 8 N) as bf16 to columns from 8 `chunk` on of the rows from `first` on that come before
// `end`. Goes through `staging`, those columns of 16 M rows of a tile that no other warp uses, to write 16
// bytes a lane.
template <int D, int M, int N>
__device__ __forceinline__ void store_rows(const HeadRows<Element>& to, int first, int end, int chunk,
                                           Element* staging, const float (&d)[M][N][4], int lane) {
  constexpr int width = row_threads<N>, rows_at_once = warp_size / width;
  __syncwarp();
  write_tile<D>(staging, chunk, d, lane);
  __syncwarp();
  const int first_row = lane / width, column = lane % width;
#pragma unroll
  for (int i = 0; i < 16 * M; i += rows_at_once) {
    const int row = first_row + i;
    if (column < N && first + row < end) {
      store_vec(to.row(first + row) + (chunk + column) * 8,
                load_vec(staging + Tile<D>::at(row, chunk + column)));
    }
  }
}

}  // namespace strata::gpu::flash
