#include "cuda/emulation/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

// Defined by race_hooks.cpp, which is linked only where a kernel was compiled with its hooks.
extern "C" __attribute__((weak)) void __tsan_init();

namespace strata::emulation {

namespace {

constexpr std::size_t alignment = 256;  // cudaMalloc's
constexpr std::size_t gap = 1024;       // at least this much of nothing follows each allocation

char* reserve(std::size_t size) {
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

std::size_t rounded_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Arena::Arena()
    : base_(reserve(bytes)),
      validity_(reinterpret_cast<std::uint8_t*>(reserve(bytes / granule))),
      cells_(reserve(bytes / granule * cell_bytes_per_granule)) {
  free_[gap] = bytes - gap;
}

Arena::~Arena() {
  munmap(base_, bytes);
  munmap(validity_, bytes / granule);
  munmap(cells_, bytes / granule * cell_bytes_per_granule);
}

void* Arena::allocate(std::size_t size, bool is_shared) {
  if (size > bytes) throw std::bad_alloc();
  const std::size_t padded = rounded_up(size + gap, alignment);
  const std::lock_guard lock(mutex_);
  auto hole = free_.lower_bound(next_);
  const auto fits = [&](const auto& entry) { return entry.second >= padded; };
  hole = std::find_if(hole, free_.end(), fits);
  if (hole == free_.end()) hole = std::find_if(free_.begin(), free_.end(), fits);
  if (hole == free_.end()) throw std::bad_alloc();
  const auto [offset, hole_size] = *hole;
  free_.erase(hole);
  if (hole_size > padded) free_[offset + padded] = hole_size - padded;
  used_[offset] = {padded, size};
  next_ = offset + padded;
  mark(base_ + offset, size, is_shared ? Validity::shared : std::uint8_t{0}, true);
  return base_ + offset;
}

void Arena::release(void* p) {
  const std::lock_guard lock(mutex_);
  const auto entry = used_.find(static_cast<std::size_t>(static_cast<char*>(p) - base_));
  auto [offset, sizes] = *entry;
  auto [padded, size] = sizes;
  used_.erase(entry);
  mark(p, size, 0, false);
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + padded) {
    padded += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += padded;
      return;
    }
  }
  free_[offset] = padded;
}

void Arena::mark(void* p, std::size_t size, std::uint8_t flags, bool exists) {
  const std::size_t first = granule_of(p);
  const std::size_t whole = size / granule;
  std::memset(validity_ + first, exists ? flags | static_cast<int>(granule) : 0, whole);
  if (size % granule != 0) {
    validity_[first + whole] = exists ? static_cast<std::uint8_t>(flags | size % granule) : std::uint8_t{0};
  }
}

void Arena::forget_cells() {
  madvise(cells_, bytes / granule * cell_bytes_per_granule, MADV_DONTNEED);
}

Arena* arena() {
  if (!__tsan_init) return nullptr;
  static Arena instance;
  return &instance;
}

void* allocate_exact(std::size_t size, bool is_shared) {
  if (Arena* a = arena()) return a->allocate(size, is_shared);
  void* p = nullptr;
  if (posix_memalign(&p, alignment, std::max<std::size_t>(size, 1)) != 0) throw std::bad_alloc();
  return p;
}

void release_exact(void* p) {
  if (Arena* a = arena()) {
    a->release(p);
  } else {
    std::free(p);
  }
}

DeviceMemory& DeviceMemory::instance() {
  arena();  // built first, so destroyed last
  static DeviceMemory memory;
  return memory;
}

DeviceMemory::~DeviceMemory() {
  for (const auto& [begin, size] : ranges_) release_exact(const_cast<char*>(begin));
}

void* DeviceMemory::allocate(std::size_t size) {
  void* p = allocate_exact(size, false);
  const std::lock_guard lock(mutex_);
  ranges_[static_cast<const char*>(p)] = size;
  in_use_ += size;
  return p;
}

bool DeviceMemory::release(void* p) {
  {
    const std::lock_guard lock(mutex_);
    const auto entry = ranges_.find(static_cast<const char*>(p));
    if (entry == ranges_.end()) return false;
    in_use_ -= entry->second;
    ranges_.erase(entry);
  }
  release_exact(p);
  return true;
}

std::optional<MemoryRange> DeviceMemory::find(const void* p) const {
  const std::lock_guard lock(mutex_);
  auto entry = ranges_.upper_bound(static_cast<const char*>(p));
  if (entry == ranges_.begin()) return std::nullopt;
  --entry;
  // One past the end still names this allocation: an empty tail of a tensor.
  if (static_cast<const char*>(p) > entry->first + entry->second) return std::nullopt;
  return MemoryRange{entry->first, entry->second};
}

bool DeviceMemory::holds(const void* p, std::size_t size) const {
  const auto range = find(p);
  return range && static_cast<const char*>(p) + size <= range->begin + range->size;
}

std::size_t DeviceMemory::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

}  // namespace strata::emulation
