// The launchers of this folder's .cu files, for its tests.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace strata::test {

// layout.cu
void launch_load_tiles(std::uint32_t* out, const std::uint16_t* in, int tiles, bool transposed);
void launch_multiply_bf16(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b);
void launch_multiply_tf32(float* c, const float* a, const float* b);
void launch_shuffle(long long* out, int blocks, int threads);
void launch_block_votes(int* out, int threads);
void launch_zero_fill(unsigned char* out, const unsigned char* in, int bytes);
void launch_atomics(int* i, unsigned* u, float* f, int threads);

}  // namespace strata::test
