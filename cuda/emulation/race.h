// Finds pairs of accesses that nothing orders, while the kernel runs in any one order.
//
// Every access of a kernel compiled in mode `race` comes here. For each 4-byte granule the last few accesses
// are kept; a new one that overlaps an older one, with at least one of them writing and not both atomic, is a
// race unless the older one happened before it:
//   same thread; or same block, with a completed __syncthreads between; or same warp, through __syncwarp
//   calls whose masks name both (also by way of other lanes); or by way of an atomic: the older side fenced
//   (__threadfence), then updated an atomic that the newer side, or a thread ordered before it, updated
//   later.
// A shuffle or vote orders nothing, as CUDA says. Launches are ordered: they do not race with each other.
// A cp.async destination belongs to the copy until the issuing thread waits for it: any access before that is
// a race. No false report follows from what is forgotten (four accesses are kept for a granule), only a
// missed one.
#pragma once

#include "cuda/emulation/launch.h"
#include "cuda/emulation/memory.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace strata::emulation {

enum class Access : std::uint8_t { read, write, atomic, copying };

// Where an access was made: a code address (told apart by the high bit) or an entry in the table of places.
using Site = std::uint32_t;

class RaceDetector {
 public:
  explicit RaceDetector(Arena& arena);

  void begin_launch(unsigned threads_per_block, std::size_t reports_maximum);
  void begin_block(std::uint32_t block);

  // [p, p + bytes) is accessed by `thread` of the current block. Addresses outside the arena (locals) are
  // ignored.
  void access(unsigned thread, const void* p, std::size_t bytes, Access kind, Site site);
  // The copy that `thread` issued to [p, p + bytes) is complete and waited for.
  void copy_done(unsigned thread, const void* p, std::size_t bytes, Site site);

  void barrier();  // all threads of the block
  void warp_sync(unsigned warp, unsigned lanes);
  void fence(unsigned thread);
  void atomic_order(unsigned thread, const void* p);  // an atomic update at p, after access(..., atomic, ...)

  static Site site(const void* code_address);
  Site site(Where where);

  struct Finding {
    bool out_of_bounds;
    const void* address;
    std::size_t bytes;
    unsigned thread;  // of the current block
    Access kind;
    Site site;
    // For a race, the older access:
    std::uint32_t other_block = 0;
    unsigned other_thread = 0;
    Access other_kind = Access::read;
    Site other_site = 0;
  };
  // Called for each finding whose pair of sites is new, up to the launch's maximum.
  void on_finding(std::function<void(const Finding&)> handler) { handler_ = std::move(handler); }
  bool full() const { return reported_.size() >= reports_maximum_; }

  // "kernel.cu:12 in row_sums", from the program's debug information where needed.
  std::string describe(Site site) const;

 private:
  // What a thread knows of threads outside its own block's barriers and warp.
  struct Knowledge {
    std::unordered_map<std::uint32_t, std::uint32_t> blocks;   // block -> its epochs below this
    std::unordered_map<std::uint64_t, std::uint32_t> threads;  // (block, thread) -> its clocks below this
    void join(const Knowledge& other);
  };
  using KnowledgePointer = std::shared_ptr<const Knowledge>;
  struct Cell;

  bool happened_before(const Cell& cell, unsigned thread) const;
  void granule_access(unsigned thread, std::size_t index, unsigned mask, Access kind, Site site,
                      const void* p, std::size_t bytes);
  void report(const Finding& finding);
  std::uint32_t advanced(unsigned thread);  // the thread's clock, one later
  static KnowledgePointer joined(const KnowledgePointer& a, const KnowledgePointer& b);

  Arena& arena_;
  std::function<void(const Finding&)> handler_;
  std::uint32_t launch_ = 0;
  unsigned threads_ = 0;
  std::uint32_t block_ = 0;
  std::uint32_t epoch_ = 0;  // barriers that the current block completed
  std::size_t reports_maximum_ = 0;
  std::set<std::pair<Site, Site>> reported_;
  std::vector<Where> places_;
  std::uint32_t evictions_ = 0;

  // Per thread of the current block.
  std::vector<std::uint32_t> clock_;  // grows whenever the thread publishes what it did
  std::vector<std::uint32_t>
      lanes_known_;                       // [thread][32]: the clocks of its warp's lanes below this are known
  std::vector<KnowledgePointer> known_;   // through atomics
  std::vector<KnowledgePointer> fenced_;  // what its next atomic update publishes
  std::unordered_map<const void*, KnowledgePointer> published_;  // at each atomic's address, this launch
};

}  // namespace strata::emulation
