#include "cuda/emulation/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <new>

// Present when the program is linked with AddressSanitizer, which must be told about every change of stack.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom,
                                                          std::size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_old,
                                                           std::size_t* size_old);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address, std::size_t size);
}

#if defined(__x86_64__)
// void strata_switch_stack(void** save, void* load): keeps what the System V ABI lets a callee rely on, and
// nothing else (the x87 and SSE control words are the same in all fibers).
extern "C" void strata_switch_stack(void** save, void* load);
asm(R"(
.text
.hidden strata_switch_stack
.globl strata_switch_stack
.type strata_switch_stack, @function
strata_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size strata_switch_stack, . - strata_switch_stack
)");
#endif

namespace strata::emulation {

namespace {

// Enough for kernels under AddressSanitizer, whose frames are several times larger. Untouched pages cost
// nothing.
constexpr std::size_t stack_bytes = 256 * 1024;

// Fibers run the same code at the same depth: without an offset of its own per stack, all frames would
// compete for the same few sets of the first-level cache.
constexpr std::size_t stack_colours = 61;
constexpr std::size_t colour_bytes = 128;

constinit thread_local FiberSet* starting_set = nullptr;

}  // namespace

struct FiberSet::Fiber {
  void* stack =
      nullptr;  // lowest usable byte; nullptr for the scheduler, which runs on the host thread's stack
  void* saved = nullptr;  // stack pointer while not running (assembly)
  ucontext_t context;     // (ucontext)
  void* fake_stack = nullptr;
  const void* bottom = nullptr;  // what AddressSanitizer is told of this stack
  std::size_t size = 0;
  bool finished = false;

  ~Fiber() {
    if (stack != nullptr) {
      const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
      munmap(static_cast<char*>(stack) - page, stack_bytes + page);
    }
  }
};

FiberKind default_fiber_kind() {
#if defined(__x86_64__)
  return FiberKind::assembly;
#else
  return FiberKind::ucontext;
#endif
}

FiberSet::FiberSet(FiberKind kind, std::function<void(std::size_t)> body)
    : kind_(kind), body_(std::move(body)), scheduler_(std::make_unique<Fiber>()) {}

FiberSet::~FiberSet() = default;

// The loop that every fiber runs for ever: a body, then back to the scheduler.
void fiber_main(FiberSet& set) {
  set.enter(*set.fibers_[set.current_]);
  for (;;) {
    const std::size_t index = set.current_;
    set.body_(index);
    set.fibers_[index]->finished = true;
    set.yield();
  }
}

namespace {
void fiber_start() {
  fiber_main(*starting_set);
}
}  // namespace

void FiberSet::prepare(Fiber& fiber, std::size_t index) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(fiber.stack, stack_bytes);
  fiber.finished = false;
  fiber.fake_stack = nullptr;
  const std::size_t usable = stack_bytes - index % stack_colours * colour_bytes;
  if (kind_ == FiberKind::ucontext) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = usable;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &fiber_start, 0);
    return;
  }
  // As strata_switch_stack leaves a stack: six registers, then where to return to. The ABI wants rsp + 8 to
  // be a multiple of 16 at a function's first instruction.
  auto* top = reinterpret_cast<std::uintptr_t*>(static_cast<char*>(fiber.stack) + usable);
  top -= 2;
  *top = reinterpret_cast<std::uintptr_t>(&fiber_start);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber.saved = top;
}

void FiberSet::reserve(std::size_t count) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  while (fibers_.size() < count) {
    void* memory = mmap(nullptr, stack_bytes + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page, PROT_NONE);  // an overflow faults instead of running into the next stack
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = static_cast<char*>(memory) + page;
    fiber->bottom = fiber->stack;
    fiber->size = stack_bytes;
    prepare(*fiber, fibers_.size());
    fibers_.push_back(std::move(fiber));
  }
}

void FiberSet::enter(Fiber& fiber) {
  if (__sanitizer_finish_switch_fiber) {
    Fiber& from = &fiber == scheduler_.get() ? *fibers_[current_] : *scheduler_;
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &bottom, &size);
    if (&from == scheduler_.get()) from.bottom = bottom, from.size = size;
  }
}

void FiberSet::leave(Fiber& fiber) {
  if (__sanitizer_start_switch_fiber) {
    const Fiber& to = &fiber == scheduler_.get() ? *fibers_[current_] : *scheduler_;
    __sanitizer_start_switch_fiber(&fiber.fake_stack, to.bottom, to.size);
  }
}

bool FiberSet::resume(std::size_t index) {
  Fiber& to = *fibers_[index];
  current_ = index;
  starting_set = this;
  leave(*scheduler_);
#if defined(__x86_64__)
  if (kind_ == FiberKind::assembly) {
    strata_switch_stack(&scheduler_->saved, to.saved);
  } else {
    swapcontext(&scheduler_->context, &to.context);
  }
#else
  swapcontext(&scheduler_->context, &to.context);
#endif
  enter(*scheduler_);
  const bool finished = to.finished;
  to.finished = false;
  return finished;
}

void FiberSet::yield() {
  Fiber& from = *fibers_[current_];
  leave(from);
#if defined(__x86_64__)
  if (kind_ == FiberKind::assembly) {
    strata_switch_stack(&from.saved, scheduler_->saved);
  } else {
    swapcontext(&from.context, &scheduler_->context);
  }
#else
  swapcontext(&from.context, &scheduler_->context);
#endif
  enter(from);
}

void FiberSet::reset() {
  for (std::size_t i = 0; i < fibers_.size(); ++i) prepare(*fibers_[i], i);
}

bool FiberSet::on_stack(const void* p) const {
  for (const auto& fiber : fibers_) {
    const auto* bottom = static_cast<const char*>(fiber->stack);
    if (p >= bottom && p < bottom + stack_bytes) return true;
  }
  return false;
}

}  // namespace strata::emulation
