// Attention without tensor cores or tiles: fp32, and bf16 of any even head size up to 256. Not the fast path.
//
// A warp does one query (forward, dq) or one key (dk and dv), 32 of the others at a time: each lane forms the
// score of one of them, reading its row whole; then each lane sums its own elements of the head over the 32.
// Every sum runs in a fixed order. Rows are read again by every warp, so a call moves about 8 T times the
// bytes of its matrices through the caches; nothing but a row's state is kept in registers, and no shared
// memory is used.
#include <cmath>

#include "cuda/check.h"
#include "cuda/kernels/attention_launch.h"
#include "cuda/kernels/gpu.h"

namespace strata::gpu::plain {
namespace {

constexpr int warps = 4;
constexpr int lane_elements = 256 / warp_size;  // of the largest head

__device__ __forceinline__ float value(float x) {
  return x;
}
__device__ __forceinline__ float value(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ void put(float* p, float x) {
  *p = x;
}
__device__ __forceinline__ void put(__nv_bfloat16* p, float x) {
  *p = __float2bfloat16_rn(x);
}

template <typename T>
struct View {
  T* data;
  std::int64_t stride;
  __device__ __forceinline__ T* at(std::int64_t row, std::int64_t column) const {
    return data + row * stride + column;
  }
};
template <typename T>
View<T> view(const Matrix& x) {
  return {static_cast<T*>(x.data), x.stride};
}
template <typename T>
View<const T> view(const ConstMatrix& x) {
  return {static_cast<const T*>(x.data), x.stride};
}

// The token of one head that this warp works on; the grid is (tokens / warps, heads, sequences).
struct Place {
  std::int64_t batch, first_row;  // of the sequence
  int token, head;
  std::int64_t statistic;  // index of (sequence, head, token)
  bool exists;
};
__device__ __forceinline__ Place place(const AttentionSizes& sizes) {
  const int token = static_cast<int>(blockIdx.x * warps + threadIdx.x / warp_size);
  const int head = static_cast<int>(blockIdx.y);
  const std::int64_t batch = blockIdx.z;
  return {batch,
          batch * sizes.sequence,
          token,
          head,
          (batch * static_cast<int>(gridDim.y) + head) * sizes.sequence + token,
          token < sizes.sequence};
}

__device__ __forceinline__ float max_of_warp(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(full_warp, x, lane));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(full_warp, x, lane);
  return x;
}

template <typename T>
__device__ __forceinline__ float dot(const T* a, const T* b, int head_size) {
  float sum = 0;
  for (int d = 0; d < head_size; ++d) sum = __fmaf_rn(value(a[d]), value(b[d]), sum);
  return sum;
}

// This lane's elements of a head: lane, lane + 32, ...
struct LaneSums {
  float element[lane_elements] = {};

  // += the sum over the lanes below `count` of lane j's weight times the row j rows after `first`.
  template <typename T>
  __device__ __forceinline__ void add(float weight, const T* first, std::int64_t stride, int count,
                                      int head_size, int lane) {
    for (int j = 0; j < count; ++j) {
      const float by = __shfl_sync(full_warp, weight, j);
#pragma unroll
      for (int e = 0; e < lane_elements; ++e) {
        const int d = lane + e * warp_size;
        if (d < head_size) element[e] = __fmaf_rn(by, value(first[j * stride + d]), element[e]);
      }
    }
  }
  __device__ __forceinline__ void scale(float by) {
#pragma unroll
    for (int e = 0; e < lane_elements; ++e) element[e] *= by;
  }
  template <typename T>
  __device__ __forceinline__ void write(T* row, int head_size, int lane) const {
#pragma unroll
    for (int e = 0; e < lane_elements; ++e) {
      const int d = lane + e * warp_size;
      if (d < head_size) put(row + d, element[e]);
    }
  }
};

template <typename T>
struct Arguments {
  View<T> out_or_dq, dk, dv;  // forward: out alone
  View<const T> dout, out, q, k, v;
  float* lse_out;
  const float* lse;
  float* delta;
  AttentionSizes sizes;
};

template <typename T>
__global__ void __launch_bounds__(warps* warp_size, 2) attention_plain_forward_kernel(Arguments<T> args) {
  const AttentionSizes& sizes = args.sizes;
  const Place at = place(sizes);
  if (!at.exists) return;
  const int size = sizes.head_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  const int key_column = at.head / sizes.group * size;
  const T* const query = args.q.at(at.first_row + at.token, at.head * size);
  LaneSums out;
  float most = -INFINITY, sum = 0;
  for (int first = 0; first <= at.token; first += warp_size) {
    const int key = first + lane, count = min(warp_size, at.token - first + 1);
    float score = -INFINITY;
    if (key <= at.token) score = dot(query, args.k.at(at.first_row + key, key_column), size) * sizes.scale;
    const float before = most;
    most = max_of_warp(fmaxf(most, score));
    const float shift = most == -INFINITY ? 0.0f : most;
    const float fade = expf(before - shift), probability = expf(score - shift);
    sum = __fmaf_rn(sum, fade, sum_of_warp(probability));
    out.scale(fade);
    out.add(probability, args.v.at(at.first_row + first, key_column), args.v.stride, count, size, lane);
  }
  out.scale(1.0f / sum);
  out.write(args.out_or_dq.at(at.first_row + at.token, at.head * size), size, lane);
  if (lane == 0) args.lse_out[at.statistic] = most + logf(sum);
}

// Also writes delta, the sum of out * dout, for the keys' kernel.
template <typename T>
__global__ void __launch_bounds__(warps* warp_size, 2) attention_plain_queries_kernel(Arguments<T> args) {
  const AttentionSizes& sizes = args.sizes;
  const Place at = place(sizes);
  if (!at.exists) return;
  const int size = sizes.head_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  const std::int64_t row = at.first_row + at.token;
  const int column = at.head * size, key_column = at.head / sizes.group * size;
  const T *const query = args.q.at(row, column), *const dout = args.dout.at(row, column);
  const float lse = args.lse[at.statistic];
  const float delta = dot(dout, args.out.at(row, column), size);
  if (lane == 0) args.delta[at.statistic] = delta;
  LaneSums dq;
  for (int first = 0; first <= at.token; first += warp_size) {
    const int key = first + lane, count = min(warp_size, at.token - first + 1);
    float gradient = 0;
    if (key <= at.token) {
      const float score = dot(query, args.k.at(at.first_row + key, key_column), size) * sizes.scale;
      const float dprobability = dot(dout, args.v.at(at.first_row + key, key_column), size);
      gradient = expf(score - lse) * (dprobability - delta) * sizes.scale;
    }
    dq.add(gradient, args.k.at(at.first_row + first, key_column), args.k.stride, count, size, lane);
  }
  dq.write(args.out_or_dq.at(row, column), size, lane);
}

template <typename T>
__global__ void __launch_bounds__(warps* warp_size, 2) attention_plain_keys_kernel(Arguments<T> args) {
  const AttentionSizes& sizes = args.sizes;
  const Place at = place(sizes);
  if (!at.exists) return;
  const int size = sizes.head_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  const std::int64_t row = at.first_row + at.token;
  const T* const key = args.k.at(row, at.head * size);
  const T* const own_value = args.v.at(row, at.head * size);
  LaneSums dk, dv;
  for (int head = at.head * sizes.group; head < (at.head + 1) * sizes.group; ++head) {
    const std::int64_t statistics = (at.batch * sizes.query_heads + head) * sizes.sequence;
    const int column = head * size;
    for (int first = at.token; first < sizes.sequence; first += warp_size) {
      const int query = first + lane, count = min(warp_size, sizes.sequence - first);
      float probability = 0, gradient = 0;
      if (query < sizes.sequence) {
        const float score = dot(args.q.at(at.first_row + query, column), key, size) * sizes.scale;
        const float dprobability = dot(args.dout.at(at.first_row + query, column), own_value, size);
        probability = expf(score - args.lse[statistics + query]);
        gradient = probability * (dprobability - args.delta[statistics + query]) * sizes.scale;
      }
      dv.add(probability, args.dout.at(at.first_row + first, column), args.dout.stride, count, size, lane);
      dk.add(gradient, args.q.at(at.first_row + first, column), args.q.stride, count, size, lane);
    }
  }
  dk.write(args.dk.at(row, at.head * size), size, lane);
  dv.write(args.dv.at(row, at.head * size), size, lane);
}

// One warp a token of each of `heads` heads. The other extents of a grid end at 65535.
dim3 grid(const AttentionShape& shape, std::int64_t heads) {
  if (heads > 65535 || shape.batch > 65535) {
    throw InternalError("attention without tensor cores on " + std::to_string(shape.batch) +
                        " sequences and " + std::to_string(heads) +
                        " heads, at most 65535 of either -> use bf16 and a usual head size");
  }
  return dim3(static_cast<unsigned>((shape.sequence + warps - 1) / warps), static_cast<unsigned>(heads),
              static_cast<unsigned>(shape.batch));
}

}  // namespace

void forward(cudaStream_t stream, const AttentionShape& shape, Matrix out, float* lse, ConstMatrix q,
             ConstMatrix k, ConstMatrix v) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    Arguments<T> args{view<T>(out), {},         {},  {},      {},      view<T>(q),
                      view<T>(k),   view<T>(v), lse, nullptr, nullptr, AttentionSizes(shape)};
    GPU_LAUNCH((attention_plain_forward_kernel<T>), grid(shape, shape.query_heads), warps * warp_size, 0,
               stream, args);
    STRATA_CUDA(cudaGetLastError());
  };
  if (q.dtype == DType::f32) {
    run(float{});
  } else {
    run(__nv_bfloat16{});
  }
}

void backward(cudaStream_t stream, const AttentionShape& shape, Matrix dq, Matrix dk, Matrix dv,
              ConstMatrix dout, ConstMatrix out, const float* lse, ConstMatrix q, ConstMatrix k,
              ConstMatrix v, float* delta) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    Arguments<T> args{view<T>(dq),  view<T>(dk), view<T>(dv), view<T>(dout),
                      view<T>(out), view<T>(q),  view<T>(k),  view<T>(v),
                      nullptr,      lse,         delta,       AttentionSizes(shape)};
    GPU_LAUNCH((attention_plain_queries_kernel<T>), grid(shape, shape.query_heads), warps * warp_size, 0,
               stream, args);
    STRATA_CUDA(cudaGetLastError());
    GPU_LAUNCH((attention_plain_keys_kernel<T>), grid(shape, shape.key_value_heads), warps * warp_size, 0,
               stream, args);
    STRATA_CUDA(cudaGetLastError());
  };
  if (q.dtype == DType::f32) {
    run(float{});
  } else {
    run(__nv_bfloat16{});
  }
}

}  // namespace strata::gpu::plain
