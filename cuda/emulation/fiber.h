// Fibers: the execution contexts of a block's threads, all on one host thread.
#pragma once

#include "cuda/emulation/options.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace strata::emulation {

// A set of fibers that each run `body(index)` once per resume-to-completion and can then be used again.
// resume() may only be called by the scheduler (the code that owns the set), yield() only inside a fiber.
class FiberSet {
 public:
  FiberSet(FiberKind kind, std::function<void(std::size_t)> body);
  ~FiberSet();
  FiberSet(const FiberSet&) = delete;
  FiberSet& operator=(const FiberSet&) = delete;

  // Makes fibers 0 .. count-1 usable. Throws std::bad_alloc where there is no memory for stacks.
  void reserve(std::size_t count);

  // Runs fiber `index` until it yields or its body returns. True when the body returned.
  bool resume(std::size_t index);

  // Back to the scheduler; returns when resumed.
  void yield();

  // Forgets what the fibers were doing: each starts its body anew. Objects on their stacks are not destroyed.
  void reset();

  // Whether p points into a fiber's stack.
  bool on_stack(const void* p) const;

 private:
  struct Fiber;
  friend void fiber_main(FiberSet& set);

  void prepare(Fiber& fiber, std::size_t index);
  void enter(Fiber& fiber);
  void leave(Fiber& fiber);

  FiberKind kind_;
  std::function<void(std::size_t)> body_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::unique_ptr<Fiber> scheduler_;
  std::size_t current_ = 0;
};

}  // namespace strata::emulation
