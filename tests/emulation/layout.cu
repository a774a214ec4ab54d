// Kernels that show where ldmatrix, mma, shuffles and votes put values.
#include "cuda/kernels/gpu.h"
#include "tests/emulation/kernels.h"

namespace strata::test {

namespace {

template <int Tiles, bool Transposed>
__global__ void load_tiles(std::uint32_t* out,
                           const std::uint16_t* in) {  // in: (Tiles, 8, 8); out: (32, Tiles)
  SHARED(std::uint16_t, tile, 4, 8, 8);
  for (int i = threadIdx.x; i < Tiles * 64; i += 32) (&tile[0][0][0])[i] = in[i];
  __syncwarp();
  const int lane = threadIdx.x;
  const std::uint16_t* row = tile[lane / 8 % Tiles][lane % 8];
  std::uint32_t r[4] = {};
  if constexpr (Tiles == 1) {
    Transposed ? gpu::ldmatrix_x1_trans(r[0], row) : gpu::ldmatrix_x1(r[0], row);
  } else if constexpr (Tiles == 2) {
    Transposed ? gpu::ldmatrix_x2_trans(r[0], r[1], row) : gpu::ldmatrix_x2(r[0], r[1], row);
  } else {
    Transposed ? gpu::ldmatrix_x4_trans(r[0], r[1], r[2], r[3], row)
               : gpu::ldmatrix_x4(r[0], r[1], r[2], r[3], row);
  }
  for (int t = 0; t < Tiles; ++t) out[lane * Tiles + t] = r[t];
}

// c (16, 8) += a (16, 16) b (16, 8), all row-major; operands reach the registers through ldmatrix.
__global__ void multiply_bf16(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b) {
  SHARED(__nv_bfloat16, as, 16, 16);
  SHARED(__nv_bfloat16, bs, 16, 8);
  const int lane = threadIdx.x;
  gpu::cp_async<16>(&as[lane / 2][lane % 2 * 8], a + lane * 8);
  if (lane < 16) gpu::cp_async<16>(bs[lane], b + lane * 8);
  gpu::cp_async_commit();
  gpu::cp_async_wait<0>();
  __syncwarp();
  std::uint32_t fa[4];
  std::uint32_t fb[2];
  gpu::ldmatrix_x4(fa[0], fa[1], fa[2], fa[3], &as[lane % 16][lane / 16 * 8]);
  gpu::ldmatrix_x2_trans(fb[0], fb[1], bs[lane % 16]);
  const int g = lane / 4;
  const int t = lane % 4 * 2;
  float d[4] = {c[g * 8 + t], c[g * 8 + t + 1], c[(g + 8) * 8 + t], c[(g + 8) * 8 + t + 1]};
  gpu::mma_bf16(d, fa, fb[0], fb[1]);
  c[g * 8 + t] = d[0];
  c[g * 8 + t + 1] = d[1];
  c[(g + 8) * 8 + t] = d[2];
  c[(g + 8) * 8 + t + 1] = d[3];
}

// c (16, 8) += a (16, 8) b (8, 8); fragments are read straight from memory.
__global__ void multiply_tf32(float* c, const float* a, const float* b) {
  const int lane = threadIdx.x;
  const int g = lane / 4;
  const int t = lane % 4;
  const std::uint32_t fa[4] = {__float_as_uint(a[g * 8 + t]), __float_as_uint(a[(g + 8) * 8 + t]),
                               __float_as_uint(a[g * 8 + t + 4]), __float_as_uint(a[(g + 8) * 8 + t + 4])};
  float d[4] = {c[g * 8 + t * 2], c[g * 8 + t * 2 + 1], c[(g + 8) * 8 + t * 2], c[(g + 8) * 8 + t * 2 + 1]};
  gpu::mma_tf32(d, fa, __float_as_uint(b[t * 8 + g]), __float_as_uint(b[(t + 4) * 8 + g]));
  c[g * 8 + t * 2] = d[0];
  c[g * 8 + t * 2 + 1] = d[1];
  c[(g + 8) * 8 + t * 2] = d[2];
  c[(g + 8) * 8 + t * 2 + 1] = d[3];
}

// out: (threads, 8)
__global__ void shuffle(long long* out) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  long long* o = out + (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  o[0] = __shfl_sync(gpu::full_warp, lane * 10, lane / 2);
  o[1] = __shfl_xor_sync(gpu::full_warp, lane * 10, 5);
  o[2] = __shfl_down_sync(gpu::full_warp, lane * 10, 3, 8);
  o[3] = __shfl_up_sync(gpu::full_warp, lane * 10LL + (1LL << 40), 2, 16);
  o[4] = __ballot_sync(gpu::full_warp, lane % 3 == 0);
  o[5] = __any_sync(gpu::full_warp, lane == 31) * 2 + __all_sync(gpu::full_warp, lane < 31);
  o[6] = lane < 8 ? __ballot_sync(0xffu, lane != 2) : 0;
  o[7] = static_cast<long long>(__shfl_xor_sync(gpu::full_warp, lane + 0.5, 16));
}

__global__ void block_votes(int* out) {  // out: (threads, 3)
  const auto i = static_cast<int>(threadIdx.x);
  out[i * 3] = __syncthreads_count(i % 3 == 0);
  out[i * 3 + 1] = __syncthreads_and(i >= 0);
  out[i * 3 + 2] = __syncthreads_or(i == 1000);
}

__global__ void zero_fill(unsigned char* out, const unsigned char* in, int bytes) {  // out: 16
  SHARED(unsigned char, buffer, 16);
  gpu::cp_async<16>(buffer, in, bytes);
  gpu::cp_async_wait_all();
  for (int i = 0; i < 16; ++i) out[i] = buffer[i];
}

__global__ void atomics(int* i, unsigned* u, float* f) {
  atomicAdd(i, static_cast<int>(threadIdx.x));
  atomicMax(i + 1, static_cast<int>(threadIdx.x * 7 % 64));
  atomicMin(i + 2, static_cast<int>(threadIdx.x * 7 % 64) - 5);
  atomicInc(u, 9);
  atomicAdd(f, 0.5f);
  int expected = 0;
  int seen = atomicCAS(i + 3, expected, expected + 2);
  while (seen != expected) {
    expected = seen;
    seen = atomicCAS(i + 3, expected, expected + 2);
  }
}

}  // namespace

void launch_load_tiles(std::uint32_t* out, const std::uint16_t* in, int tiles, bool transposed) {
  if (tiles == 1 && !transposed) GPU_LAUNCH((load_tiles<1, false>), 1, 32, 0, nullptr, out, in);
  if (tiles == 2 && !transposed) GPU_LAUNCH((load_tiles<2, false>), 1, 32, 0, nullptr, out, in);
  if (tiles == 4 && !transposed) GPU_LAUNCH((load_tiles<4, false>), 1, 32, 0, nullptr, out, in);
  if (tiles == 1 && transposed) GPU_LAUNCH((load_tiles<1, true>), 1, 32, 0, nullptr, out, in);
  if (tiles == 2 && transposed) GPU_LAUNCH((load_tiles<2, true>), 1, 32, 0, nullptr, out, in);
  if (tiles == 4 && transposed) GPU_LAUNCH((load_tiles<4, true>), 1, 32, 0, nullptr, out, in);
}

void launch_multiply_bf16(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b) {
  GPU_LAUNCH(multiply_bf16, 1, 32, 0, nullptr, c, a, b);
}

void launch_multiply_tf32(float* c, const float* a, const float* b) {
  GPU_LAUNCH(multiply_tf32, 1, 32, 0, nullptr, c, a, b);
}

void launch_shuffle(long long* out, int blocks, int threads) {
  GPU_LAUNCH(shuffle, blocks, threads, 0, nullptr, out);
}

void launch_block_votes(int* out, int threads) {
  GPU_LAUNCH(block_votes, 1, threads, 0, nullptr, out);
}

void launch_zero_fill(unsigned char* out, const unsigned char* in, int bytes) {
  GPU_LAUNCH(zero_fill, 1, 1, 0, nullptr, out, in, bytes);
}

void launch_atomics(int* i, unsigned* u, float* f, int threads) {
  GPU_LAUNCH(atomics, 1, threads, 0, nullptr, i, u, f);
}

}  // namespace strata::test
