#include "cuda/emulation/race.h"

#include "cuda/emulation/executor.h"
#include "cuda/emulation/symbolize.h"

#include <algorithm>

namespace strata::emulation {

namespace {

constexpr unsigned cells_per_granule = 4;
constexpr std::uint32_t launches_told_apart = (1u << 12) - 1;
constexpr std::uint32_t blocks_told_apart = 1u << 24;
constexpr std::uint32_t epochs_maximum = 1u << 22;
constexpr std::uint32_t clocks_maximum = 1u << 20;
constexpr Site code_bit = 0x80000000u;

constexpr std::uint64_t thread_key(std::uint32_t block, unsigned thread) {
  return std::uint64_t{block} << 10 | thread;
}

constexpr bool conflict(Access a, Access b) {
  if (a == Access::read && b == Access::read) return false;
  return !(a == Access::atomic && b == Access::atomic);
}

// Whatever races with an access of kind `old` also races with a later one of kind `now` of the same bytes.
constexpr bool stands_for(Access now, Access old) {
  return now == Access::write || now == old || now == Access::copying;
}

// The start of the program: code addresses are kept as distances from it.
extern "C" const char __executable_start;

}  // namespace

// One remembered access. A zero cell is of launch 0, which does not occur.
struct RaceDetector::Cell {
  std::uint64_t block : 24;
  std::uint64_t thread : 10;
  std::uint64_t mask : 4;  // which bytes of the granule
  std::uint64_t kind : 2;
  std::uint64_t epoch : 22;
  std::uint64_t site : 32;
  std::uint64_t clock : 20;
  std::uint64_t launch : 12;

  Access access_kind() const { return static_cast<Access>(kind); }
};

RaceDetector::RaceDetector(Arena& arena) : arena_(arena) {
  static_assert(sizeof(Cell) * cells_per_granule == Arena::cell_bytes_per_granule);
  places_.emplace_back();
}

void RaceDetector::begin_launch(unsigned threads_per_block, std::size_t reports_maximum) {
  launch_ += 1;
  if (launch_ > launches_told_apart) {
    arena_.forget_cells();
    launch_ = 1;
  }
  threads_ = threads_per_block;
  reports_maximum_ = reports_maximum;
  reported_.clear();
  published_.clear();
}

void RaceDetector::begin_block(std::uint32_t block) {
  if (block >= blocks_told_apart)
    throw Misuse({"the race detector tells 2^24 blocks apart -> use a smaller grid"});
  block_ = block;
  epoch_ = 0;
  const std::size_t padded = (threads_ + lanes_per_warp - 1) / lanes_per_warp * lanes_per_warp;
  clock_.assign(padded, 0);
  lanes_known_.assign(padded * lanes_per_warp, 0);
  known_.assign(padded, nullptr);
  fenced_.assign(padded, nullptr);
}

bool RaceDetector::happened_before(const Cell& cell, unsigned thread) const {
  const KnowledgePointer& known = known_[thread];
  if (cell.block == block_) {
    if (cell.thread == thread || cell.epoch < epoch_) return true;
    if (cell.thread / lanes_per_warp == thread / lanes_per_warp &&
        cell.clock < lanes_known_[thread * lanes_per_warp + cell.thread % lanes_per_warp]) {
      return true;
    }
  } else if (known != nullptr) {
    const auto entry = known->blocks.find(static_cast<std::uint32_t>(cell.block));
    if (entry != known->blocks.end() && cell.epoch < entry->second) return true;
  }
  if (known == nullptr) return false;
  const auto entry = known->threads.find(
      thread_key(static_cast<std::uint32_t>(cell.block), static_cast<unsigned>(cell.thread)));
  return entry != known->threads.end() && cell.clock < entry->second;
}

void RaceDetector::access(unsigned thread, const void* p, std::size_t bytes, Access kind, Site site) {
  if (bytes == 0 || !arena_.contains(p)) return;
  const auto offset = reinterpret_cast<std::uintptr_t>(p) % Arena::granule;
  const std::size_t first = arena_.granule_of(p);
  const std::size_t last = (offset + bytes - 1) / Arena::granule;
  for (std::size_t i = 0; i <= last; ++i) {
    const std::size_t begin = i == 0 ? offset : 0;
    const std::size_t end = std::min(Arena::granule, offset + bytes - i * Arena::granule);
    if ((arena_.validity(first + i) & Arena::Validity::count_mask) < end) {
      report({true, p, bytes, thread, kind, site});
      return;
    }
    const unsigned mask = (1u << end) - (1u << begin);
    granule_access(thread, first + i, mask, kind, site, p, bytes);
  }
}

void RaceDetector::granule_access(unsigned thread, std::size_t index, unsigned mask, Access kind, Site site,
                                  const void* p, std::size_t bytes) {
  Cell* const cells = static_cast<Cell*>(arena_.cells(index));
  const bool is_shared = (arena_.validity(index) & Arena::Validity::shared) != 0;
  Cell* free = nullptr;
  for (unsigned i = 0; i < cells_per_granule; ++i) {
    Cell& cell = cells[i];
    if (cell.launch != launch_ || (is_shared && cell.block != block_)) {
      free = &cell;
      continue;
    }
    const bool mine = cell.block == block_ && cell.thread == thread;
    const Access old = cell.access_kind();
    const bool ordered = old != Access::copying && happened_before(cell, thread);
    if ((cell.mask & mask) != 0 && !ordered && conflict(kind, old)) {
      report({false, p, bytes, thread, kind, site, static_cast<std::uint32_t>(cell.block),
              static_cast<unsigned>(cell.thread), old, static_cast<Site>(cell.site)});
      cell.launch = 0;  // one report for one pair is enough
      free = &cell;
      continue;
    }
    if (mine && old == kind && cell.epoch == epoch_ && cell.clock == clock_[thread] &&
        (mask & ~cell.mask) == 0 && kind != Access::copying) {
      return;  // nothing new
    }
    if (ordered && (cell.mask & ~mask) == 0 && stands_for(kind, old)) {
      cell.launch = 0;
      free = &cell;
    }
  }
  if (free == nullptr) free = &cells[evictions_++ % cells_per_granule];
  free->block = block_;
  free->thread = thread;
  free->mask = mask;
  free->kind = static_cast<std::uint64_t>(kind);
  free->epoch = epoch_;
  free->site = site;
  free->clock = clock_[thread];
  free->launch = launch_;
}

void RaceDetector::copy_done(unsigned thread, const void* p, std::size_t bytes, Site site) {
  const std::size_t first = arena_.granule_of(p);
  for (std::size_t i = 0; i < bytes / Arena::granule; ++i) {
    Cell* const cells = static_cast<Cell*>(arena_.cells(first + i));
    for (unsigned c = 0; c < cells_per_granule; ++c) {
      Cell& cell = cells[c];
      if (cell.launch == launch_ && cell.block == block_ && cell.thread == thread &&
          cell.access_kind() == Access::copying && cell.site == site) {
        cell.kind = static_cast<std::uint64_t>(Access::write);
        cell.epoch = epoch_;
        cell.clock = clock_[thread];
      }
    }
  }
}

void RaceDetector::report(const Finding& finding) {
  const auto pair = std::minmax(finding.site, finding.out_of_bounds ? Site{0} : finding.other_site);
  if (full() || !reported_.insert({pair.first, pair.second}).second) return;
  handler_(finding);
}

// ---- what orders accesses ----

void RaceDetector::Knowledge::join(const Knowledge& other) {
  for (const auto& [block, epoch] : other.blocks) blocks[block] = std::max(blocks[block], epoch);
  for (const auto& [thread, clock] : other.threads) threads[thread] = std::max(threads[thread], clock);
}

RaceDetector::KnowledgePointer RaceDetector::joined(const KnowledgePointer& a, const KnowledgePointer& b) {
  if (b == nullptr || a == b) return a;
  if (a == nullptr) return b;
  auto both = std::make_shared<Knowledge>(*a);
  both->join(*b);
  return both;
}

std::uint32_t RaceDetector::advanced(unsigned thread) {
  if (++clock_[thread] == clocks_maximum) {
    throw Misuse({"the race detector follows 2^20 __syncwarp and __threadfence calls of a thread"});
  }
  return clock_[thread];
}

void RaceDetector::barrier() {
  if (++epoch_ == epochs_maximum) throw Misuse({"the race detector follows 2^22 barriers of a block"});
  for (auto* all : {&known_, &fenced_}) {
    KnowledgePointer merged;
    for (const KnowledgePointer& one : *all) merged = joined(merged, one);
    if (merged != nullptr) std::fill(all->begin(), all->end(), merged);
  }
}

void RaceDetector::warp_sync(unsigned warp, unsigned lanes) {
  const unsigned base = warp * lanes_per_warp;
  std::uint32_t all[lanes_per_warp] = {};
  KnowledgePointer known;
  KnowledgePointer fenced;
  for (unsigned lane = 0; lane < lanes_per_warp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const std::uint32_t* row = &lanes_known_[(base + lane) * lanes_per_warp];
    for (unsigned i = 0; i < lanes_per_warp; ++i) all[i] = std::max(all[i], row[i]);
    all[lane] = std::max(all[lane], advanced(base + lane));
    known = joined(known, known_[base + lane]);
    fenced = joined(fenced, fenced_[base + lane]);
  }
  for (unsigned lane = 0; lane < lanes_per_warp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    std::copy(all, all + lanes_per_warp, &lanes_known_[(base + lane) * lanes_per_warp]);
    known_[base + lane] = known;
    fenced_[base + lane] = fenced;
  }
}

// A fence is cumulative: what was ordered before it for this thread is published too. A fence counts also for
// the atomics of threads that a later barrier or __syncwarp orders after it: kernels fence in every thread
// and count in one.
void RaceDetector::fence(unsigned thread) {
  auto snapshot = known_[thread] == nullptr ? std::make_shared<Knowledge>()
                                            : std::make_shared<Knowledge>(*known_[thread]);
  std::uint32_t& epoch = snapshot->blocks[block_];
  epoch = std::max(epoch, epoch_);
  const unsigned warp_base = thread / lanes_per_warp * lanes_per_warp;
  for (unsigned lane = 0; lane < lanes_per_warp; ++lane) {
    const std::uint32_t clock = lanes_known_[thread * lanes_per_warp + lane];
    if (clock > 0) {
      std::uint32_t& entry = snapshot->threads[thread_key(block_, warp_base + lane)];
      entry = std::max(entry, clock);
    }
  }
  snapshot->threads[thread_key(block_, thread)] = advanced(thread);
  fenced_[thread] = std::move(snapshot);
}

// CUDA's own "last block" sample has no second fence on the reading side, so none is asked for.
void RaceDetector::atomic_order(unsigned thread, const void* p) {
  KnowledgePointer& here = published_[p];
  known_[thread] = joined(known_[thread], here);
  here = joined(here, fenced_[thread]);
}

// ---- sites ----

Site RaceDetector::site(const void* code_address) {
  const auto distance =
      static_cast<std::uint64_t>(static_cast<const char*>(code_address) - &__executable_start);
  return distance < code_bit ? static_cast<Site>(distance) | code_bit : 0;
}

Site RaceDetector::site(Where where) {
  for (std::size_t i = places_.size(); i-- > 1;) {
    if (places_[i].line == where.line && places_[i].file == where.file) return static_cast<Site>(i);
  }
  places_.push_back(where);
  return static_cast<Site>(places_.size() - 1);
}

std::string RaceDetector::describe(Site site) const {
  if (site == 0) return "an unknown place";
  if ((site & code_bit) == 0) return format_where(places_[site]);
  return symbolize(&__executable_start + (site & ~code_bit));
}

}  // namespace strata::emulation
