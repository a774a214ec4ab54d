// Between a kernel and the executor: the calls that kernel_api.h makes, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace strata::emulation {

// A place in a kernel's source. As the default argument Where::here() it names the caller's line.
struct Where {
  const char* file = "";
  int line = 0;
  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

enum class BarrierKind { plain, count, all, any };
enum class ShuffleKind { index, exclusive_or, down, up };
enum class AtomicOp { add, maximum, minimum, exchange, increment, compare_and_swap };

// ---- called by a running emulated thread ----

void* static_shared(const void* key, std::size_t bytes, const char* name, Where where);
void* dynamic_shared(Where where);

int block_barrier(BarrierKind kind, int predicate, Where where);
void warp_sync(unsigned mask, Where where);
std::uint64_t warp_shuffle(ShuffleKind kind, unsigned mask, std::uint64_t value, int lane, int width,
                           Where where);
unsigned warp_ballot(unsigned mask, int predicate, Where where);
void warp_ldmatrix(std::uint32_t* registers, int tiles, bool transposed, const void* row, Where where);
void warp_mma_bf16(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, Where where);
void warp_mma_tf32(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, Where where);

void copy_async(void* shared, const void* global, int bytes, int source_bytes, Where where);
void copy_async_commit();
void copy_async_wait(int pending);
void copy_async_wait_all();

void memory_fence();
template <typename T>
T atomic_update(T* address, AtomicOp op, T operand, T compare, Where where);

void report_misaligned(const void* p, std::size_t alignment, Where where);
void vector_access(const void* p, Where where);  // 16 bytes

inline void check_alignment(const void* p, std::size_t alignment, Where where) {
  if ((reinterpret_cast<std::uintptr_t>(p) & (alignment - 1)) != 0) report_misaligned(p, alignment, where);
}

// ---- launching ----

// Everything about one launch: a copy is kept until the stream runs it.
struct Launch {
  const void* kernel = nullptr;  // its address: the key of cudaFuncSetAttribute
  const char* name = "";
  dim3 grid;
  dim3 block;
  std::size_t dynamic_shared_bytes = 0;
  cudaStream_t stream = nullptr;
  Where where;
  std::vector<const void*> pointers;  // the arguments that are pointers
  std::function<void()> thread;       // the kernel with its arguments, as one thread runs it
};

// Checks the launch, then runs it now, or hands it to the stream's queue where one is installed. Throws
// Misuse.
void submit(Launch launch);

// Runs every thread of every block on this host thread. Throws Misuse.
void run(const Launch& launch);

// A host-side emulation of streams takes over launches with this; an empty function restores running at once.
using StreamQueue = std::function<void(cudaStream_t, std::function<void()>)>;
void set_stream_queue(StreamQueue queue);

template <typename P>
P converted(P value) {
  return value;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const char* name, dim3 grid, dim3 block,
            std::size_t dynamic_shared_bytes, cudaStream_t stream, Where where, Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments),
                "the kernel takes another number of arguments");
  std::tuple<Parameters...> values(converted<Parameters>(arguments)...);
  Launch described{
      reinterpret_cast<const void*>(kernel), name, grid, block, dynamic_shared_bytes, stream, where, {}, {}};
  std::apply(
      [&](const auto&... value) {
        const auto note = [&](const auto& v) {
          if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(v)>>) described.pointers.push_back(v);
        };
        (note(value), ...);
      },
      values);
  described.thread = [kernel, values] { std::apply(kernel, values); };
  submit(std::move(described));
}

}  // namespace strata::emulation
