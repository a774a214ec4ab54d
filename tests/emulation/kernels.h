// The launchers of this folder's .cu files, for its tests.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace strata::test {

// layout.cu
void launch_load_tiles(std::uint32_t* out, const std::uint16_t* in, int tiles, bool transposed);
void launch_multiply_bf16(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b);
void launch_multiply_tf32(float* c, const float* a, const float* b);
void launch_shuffle(long long* out, int blocks, int threads);
void launch_block_votes(int* out, int threads);
void launch_zero_fill(unsigned char* out, const unsigned char* in, int bytes);
void launch_atomics(int* i, unsigned* u, float* f, int threads);

// races.cu
struct RaceCase {
  std::string name;
  bool correct;
  bool out_of_bounds;
  std::function<void()>
      run;  // allocates, launches, and checks the numbers of correct kernels where orders matter
};
std::vector<RaceCase> race_cases();

// The line of this folder's `file` that contains `mark`, as reports name it: "tests/emulation/races.cu:12".
std::string place_of(const std::string& file, const std::string& mark);

}  // namespace strata::test
