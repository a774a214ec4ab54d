// The functions that code compiled with -fsanitize=thread calls on every access, defined here instead of by
// the ThreadSanitizer runtime. Linked only into programs with such kernels. Not itself compiled with the
// option.
#include "cuda/emulation/executor.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace strata::emulation {
namespace {

inline void note(const void* p, std::size_t bytes, std::size_t alignment, Access kind, const void* code) {
  Executor* executor = Executor::running();
  if (executor == nullptr) return;  // host code of the same file
  RaceDetector* race = executor->race();
  if (race == nullptr || !arena()->contains(p)) return;
  if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0) {
    executor->stop("misaligned " + std::to_string(bytes) + "-byte access at " +
                   race->describe(RaceDetector::site(code)) + " by " +
                   executor->describe_thread(executor->current()) + ": " + executor->describe_address(p));
    executor->halt();  // the compiler takes these hooks for functions that do not throw
  }
  race->access(executor->current(), p, bytes, kind, RaceDetector::site(code));
}

}  // namespace
}  // namespace strata::emulation

// The return address lies after the call: one byte back is inside the instruction whose line is wanted.
#define STRATA_HERE (static_cast<const char*>(__builtin_return_address(0)) - 1)
#define STRATA_NOTE(bytes, alignment, kind) \
  strata::emulation::note(p, bytes, alignment, strata::emulation::Access::kind, STRATA_HERE)
#define STRATA_HOOKS(bytes)                     \
  void __tsan_read##bytes(void* p) {            \
    STRATA_NOTE(bytes, bytes, read);            \
  }                                             \
  void __tsan_write##bytes(void* p) {           \
    STRATA_NOTE(bytes, bytes, write);           \
  }                                             \
  void __tsan_unaligned_read##bytes(void* p) {  \
    STRATA_NOTE(bytes, 1, read);                \
  }                                             \
  void __tsan_unaligned_write##bytes(void* p) { \
    STRATA_NOTE(bytes, 1, write);               \
  }                                             \
  void __tsan_volatile_read##bytes(void* p) {   \
    STRATA_NOTE(bytes, bytes, read);            \
  }                                             \
  void __tsan_volatile_write##bytes(void* p) {  \
    STRATA_NOTE(bytes, bytes, write);           \
  }                                             \
  void __tsan_read_write##bytes(void* p) {      \
    STRATA_NOTE(bytes, bytes, read);            \
    STRATA_NOTE(bytes, bytes, write);           \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

STRATA_HOOKS(1)
STRATA_HOOKS(2)
STRATA_HOOKS(4)
STRATA_HOOKS(8)
STRATA_HOOKS(16)

void __tsan_read_range(void* p, std::size_t bytes) {
  STRATA_NOTE(bytes, 1, read);
}
void __tsan_write_range(void* p, std::size_t bytes) {
  STRATA_NOTE(bytes, 1, write);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Atomics of the host language occur in host code only (guards of function-local statics, std::shared_ptr).
#define STRATA_ATOMIC_HOOKS(bits, T)                                                               \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                         \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                      \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                                      \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                                     \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                                     \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {   \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {     \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
STRATA_ATOMIC_HOOKS(8, std::uint8_t)
STRATA_ATOMIC_HOOKS(32, std::uint32_t)
STRATA_ATOMIC_HOOKS(64, std::uint64_t)

}  // extern "C"
