// Kernels with one planted race each, and correct kernels that look like them. The lines between which a race
// must be reported carry the marks "older:<name>" and "newer:<name>" (either side may come first).
#include "cuda/kernels/gpu.h"
#include "tests/emulation/kernels.h"
#include "tests/support/device_array.h"

namespace strata::test {

namespace {

// ---- within a block ----

template <bool Correct>
__global__ void block_exchange(int* out) {
  SHARED(int, value, 64);
  const auto i = threadIdx.x;
  value[i] = static_cast<int>(i);  // older:barrier
  if (Correct) __syncthreads();
  out[i] = value[63 - i];  // newer:barrier
}

template <bool Correct>
__global__ void refill(int* out) {
  SHARED(int, value, 64);
  const auto i = threadIdx.x;
  int sum = 0;
  for (int step = 0; step < 3; ++step) {
    value[i] = step;  // newer:refill
    __syncthreads();
    sum += value[63 - i];  // older:refill
    if (Correct) __syncthreads();
  }
  out[i] = sum;
}

template <bool Correct>
__global__ void warp_exchange(int* out) {
  SHARED(int, value, 32);
  const auto i = threadIdx.x;
  value[i] = static_cast<int>(i);  // older:syncwarp
  if (Correct) __syncwarp();
  out[i] = value[31 - i];  // newer:syncwarp
}

// A shuffle makes the lanes meet but orders no memory.
template <bool Correct>
__global__ void shuffle_is_no_fence(int* out) {
  SHARED(int, value, 32);
  const auto i = threadIdx.x;
  value[i] = static_cast<int>(i);  // older:shuffle
  const int other = __shfl_xor_sync(gpu::full_warp, static_cast<int>(i), 1);
  if (Correct) __syncwarp();
  out[i] = value[other];  // newer:shuffle
}

// Each half of the warp synchronises by itself; only the racy form reads across.
template <bool Correct>
__global__ void half_warps(int* out) {
  SHARED(int, value, 32);
  const auto i = threadIdx.x;
  value[i] = static_cast<int>(i);  // older:mask
  __syncwarp(i < 16 ? 0x0000ffffu : 0xffff0000u);
  out[i] = value[Correct ? i ^ 15 : 31 - i];  // newer:mask
}

// Lane 2 learns of lane 0's write through lane 1: two masks that share one lane.
template <bool Correct>
__global__ void relay(int* out) {
  SHARED(int, value);
  const auto i = threadIdx.x;
  if (i == 0) value = 7;  // older:relay
  if (Correct && i < 2) __syncwarp(0x3);
  if (i == 1 || i == 2) __syncwarp(0x6);
  if (i == 2) out[0] = value;  // newer:relay
}

template <bool Correct>
__global__ void count(int* out) {
  if (Correct) {
    atomicAdd(out, 1);
  } else {
    out[0] += 1;  // older:count newer:count
  }
}

// Reading an atomic's word without an atomic, unordered.
template <bool Correct>
__global__ void peek(int* out) {
  SHARED(int, counter);
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  atomicAdd(&counter, 1);  // older:peek
  if (Correct) __syncthreads();
  out[threadIdx.x] = counter;  // newer:peek
}

// Two threads write neighbouring 2-byte elements (correct), or the same one.
template <bool Correct>
__global__ void halves(std::uint16_t* out) {
  const auto i = threadIdx.x;
  out[Correct ? i : i / 2] = static_cast<std::uint16_t>(i);  // older:halves newer:halves
}

template <bool Correct>
__global__ void bytes(unsigned char* out) {
  SHARED(unsigned char, value, 64);
  const auto i = threadIdx.x;
  value[i] = static_cast<unsigned char>(i);  // older:bytes
  if (Correct) __syncthreads();
  out[i] = value[i ^ 33];  // newer:bytes
}

// ---- ldmatrix and cp.async ----

template <bool Correct>
__global__ void tile(int* out) {
  SHARED(std::uint16_t, value, 8, 8);
  const auto lane = threadIdx.x;
  value[lane / 4][lane % 4 * 2] = 1;  // older:ldmatrix
  value[lane / 4][lane % 4 * 2 + 1] = 2;
  if (Correct) __syncwarp();
  std::uint32_t r;
  gpu::ldmatrix_x1_trans(r, value[lane % 8]);  // newer:ldmatrix
  out[lane] = static_cast<int>(r);
}

// The issuing thread reads what it copied, without a wait.
template <bool Correct>
__global__ void own_copy(int* out, const int* in) {
  SHARED(int, value, 32);
  const auto i = threadIdx.x;
  gpu::cp_async<4>(&value[i], in + i);  // older:wait
  gpu::cp_async_commit();
  if (Correct) gpu::cp_async_wait<0>();
  out[i] = value[i];  // newer:wait
}

// Another thread reads it after the wait, without a barrier.
template <bool Correct>
__global__ void other_copy(int* out, const int* in) {
  SHARED(int, value, 64);
  const auto i = threadIdx.x;
  gpu::cp_async<4>(&value[i], in + i);  // older:copybarrier
  gpu::cp_async_commit();
  gpu::cp_async_wait<0>();
  if (Correct) __syncthreads();
  out[i] = value[63 - i];  // newer:copybarrier
}

// Three stages; the racy form waits for one group too few.
template <bool Correct>
__global__ void pipeline(int* out, const int* in) {  // in: (6, 64)
  SHARED(int, stage, 3, 64);
  const auto i = threadIdx.x;
  for (int s = 0; s < 2; ++s) {
    gpu::cp_async<4>(&stage[s][i], in + s * 64 + i);
    gpu::cp_async_commit();
  }
  int sum = 0;
  for (int s = 0; s < 6; ++s) {
    gpu::cp_async_wait<Correct ? 1 : 2>();
    __syncthreads();
    if (s + 2 < 6) gpu::cp_async<4>(&stage[(s + 2) % 3][i], in + (s + 2) * 64 + i);
    gpu::cp_async_commit();
    sum += stage[s % 3][63 - i];  // newer:pipeline
  }
  out[i] = sum;
}

// ---- between blocks ----

template <bool Correct>
__global__ void blocks(int* out) {
  if (Correct) {
    out[blockIdx.x] = 1;
  } else if (threadIdx.x == 0) {
    out[0] = static_cast<int>(blockIdx.x);  // older:blocks newer:blocks
  }
}

// The last block to finish adds up what all have written: the fence before the counter is what orders it.
template <bool Correct>
__global__ void last_block(int* out, int* partial, unsigned* counter) {
  SHARED(bool, last);
  partial[blockIdx.x * 64 + threadIdx.x] = 1;  // older:last
  if (Correct) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  int sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b * 64 + threadIdx.x];  // newer:last
  out[threadIdx.x] = sum;
}

// The same with one cumulative fence, by the thread that counts.
__global__ void last_block_one_fence(int* out, int* partial, unsigned* counter) {
  SHARED(bool, last);
  partial[blockIdx.x * 64 + threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  int sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b * 64 + threadIdx.x];
  out[threadIdx.x] = sum;
}

// ---- bounds ----

__global__ void past_the_end(int* out, const int* in, int n) {
  out[threadIdx.x] = in[threadIdx.x + static_cast<unsigned>(n)];  // newer:pastend
}
__global__ void past_shared(int* out) {
  SHARED(int, value, 32);
  value[threadIdx.x] = 0;
  out[threadIdx.x] = value[threadIdx.x + (threadIdx.x == 31)];  // newer:pastshared
}
__global__ void vector_past_the_end(float* out) {
  gpu::store_vec(out + 4 * threadIdx.x, gpu::Vec<float>{});  // newer:pastvector
}

template <typename... Parameters, typename... Extra>
void run_on(void (*kernel)(int*, Parameters...), int grid, int block, Extra... extra) {
  const DeviceArray<int> out(std::vector<int>(64, 0));
  GPU_LAUNCH(kernel, grid, block, 0, nullptr, out.data(), extra...);
}

void run_with_input(void (*kernel)(int*, const int*)) {
  const DeviceArray<int> in(std::vector<int>(6 * 64, 1));
  run_on(kernel, 1, 64, in.data());
}

void run_last(void (*kernel)(int*, int*, unsigned*)) {
  const DeviceArray<int> out(64);
  const DeviceArray<int> partial(5 * 64);
  const DeviceArray<unsigned> counter(std::vector<unsigned>{0});
  GPU_LAUNCH(kernel, 5, 64, 0, nullptr, out.data(), partial.data(), counter.data());
  for (const int sum : out.download()) {
    if (sum != 5) throw std::runtime_error("the last block missed a partial sum");
  }
}

template <bool Correct>
void run_halves() {
  const DeviceArray<std::uint16_t> out(64);
  GPU_LAUNCH(halves<Correct>, 1, 64, 0, nullptr, out.data());
}

template <bool Correct>
void run_bytes() {
  const DeviceArray<unsigned char> out(64);
  GPU_LAUNCH(bytes<Correct>, 1, 64, 0, nullptr, out.data());
}

template <bool Correct>
void add_pairs(std::vector<RaceCase>& cases) {
  const auto add = [&](const char* name, std::function<void()> run) {
    cases.push_back({name, Correct, false, run});
  };
  add("barrier", [] { run_on(block_exchange<Correct>, 1, 64); });
  add("refill", [] { run_on(refill<Correct>, 1, 64); });
  add("syncwarp", [] { run_on(warp_exchange<Correct>, 1, 32); });
  add("shuffle", [] { run_on(shuffle_is_no_fence<Correct>, 1, 32); });
  add("mask", [] { run_on(half_warps<Correct>, 1, 32); });
  add("relay", [] { run_on(relay<Correct>, 1, 32); });
  add("count", [] { run_on(count<Correct>, 3, 32); });
  add("peek", [] { run_on(peek<Correct>, 1, 64); });
  add("halves", [] { run_halves<Correct>(); });
  add("bytes", [] { run_bytes<Correct>(); });
  add("ldmatrix", [] { run_on(tile<Correct>, 1, 32); });
  add("wait", [] {
    const DeviceArray<int> in(std::vector<int>(32, 1));
    run_on(own_copy<Correct>, 1, 32, in.data());
  });
  add("copybarrier", [] { run_with_input(other_copy<Correct>); });
  add("pipeline", [] { run_with_input(pipeline<Correct>); });
  add("blocks", [] { run_on(blocks<Correct>, 4, Correct ? 1 : 32); });
  add("last", [] { run_last(last_block<Correct>); });
}

}  // namespace

std::vector<RaceCase> race_cases() {
  std::vector<RaceCase> cases;
  add_pairs<true>(cases);
  add_pairs<false>(cases);
  cases.push_back({"last with one fence", true, false, [] { run_last(last_block_one_fence); }});
  cases.push_back({"pastend", false, true, [] {
                     const DeviceArray<int> in(std::vector<int>(40, 1));
                     run_on(past_the_end, 1, 32, static_cast<const int*>(in.data()), 9);
                   }});
  cases.push_back({"pastshared", false, true, [] { run_on(past_shared, 1, 32); }});
  cases.push_back({"pastvector", false, true, [] {
                     const DeviceArray<float> out(127);
                     GPU_LAUNCH(vector_past_the_end, 1, 32, 0, nullptr, out.data());
                   }});
  return cases;
}

}  // namespace strata::test
