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

// misuse.cu
struct MisuseCase {
  std::string report;              // what the report must contain
  std::vector<std::string> marks;  // the lines that it must name
  std::function<void()> run;
};
std::vector<MisuseCase> misuse_cases();
void launch_large_dynamic();  // 100 KiB, asked for
void launch_fill(int threads);

// schedule.cu: each copies `in` (256 values) reversed within blocks of 64, through shared memory; `fault`
// plants one
enum class Fault { none, no_barrier, refill_early, wait_short };
void launch_reverse(float* out, const float* in, Fault fault);

// The line of this folder's `file` that contains `mark`, as reports name it: "tests/emulation/races.cu:12".
std::string place_of(const std::string& file, const std::string& mark);

}  // namespace strata::test
