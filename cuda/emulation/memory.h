// Memory of the emulated device: which ranges cudaMalloc gave out, and, for the race detector, where shadow
// state lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace strata::emulation {

// New memory holds this byte: a NaN as bf16, fp16, fp32 and fp64, and -1 as an integer.
inline constexpr unsigned char poison_byte = 0xff;

// A reserved range of addresses from which a program with race-detecting kernels takes all emulated memory,
// so that the state of a 4-byte granule is found by arithmetic. Allocations lie apart: what lies between them
// is out of bounds.
class Arena {
 public:
  // One byte for each granule, besides its cells (race.h).
  struct Validity {
    static constexpr std::uint8_t count_mask = 7;  // how many of the granule's 4 bytes exist
    static constexpr std::uint8_t shared =
        0x80;  // it is shared memory: other blocks' accesses are to other memory
  };

  static constexpr std::size_t bytes = std::size_t{8} << 30;
  static constexpr std::size_t granule = 4;
  static constexpr std::size_t cell_bytes_per_granule = 64;

  Arena();  // throws std::bad_alloc where the address space cannot be reserved
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t size, bool is_shared);  // 256-byte aligned; throws std::bad_alloc
  void release(void* p);

  bool contains(const void* p) const {
    return static_cast<std::size_t>(static_cast<const char*>(p) - base_) < bytes;
  }
  std::size_t granule_of(const void* p) const {
    return static_cast<std::size_t>(static_cast<const char*>(p) - base_) / granule;
  }
  std::uint8_t validity(std::size_t index) const { return validity_[index]; }
  void* cells(std::size_t index) const { return cells_ + index * cell_bytes_per_granule; }
  void forget_cells();  // all cells become zero

 private:
  void mark(void* p, std::size_t size, std::uint8_t flags, bool exists);

  char* base_ = nullptr;
  std::uint8_t* validity_ = nullptr;
  char* cells_ = nullptr;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset -> size of each gap, neighbours merged
  std::map<std::size_t, std::pair<std::size_t, std::size_t>> used_;  // offset -> {padded size, size}
  std::size_t next_ =
      0;  // the search for a gap starts here, so that freed addresses rest before they are reused
};

// The arena, when this program has kernels compiled in mode `race`; else nullptr.
Arena* arena();

// Exact-size memory from the arena, or from the C library (whose red zones AddressSanitizer watches).
void* allocate_exact(std::size_t size, bool is_shared);
void release_exact(void* p);

struct MemoryRange {
  const char* begin = nullptr;
  std::size_t size = 0;
};

// What cudaMalloc gave out and cudaFree has not taken back.
class DeviceMemory {
 public:
  static DeviceMemory& instance();
  ~DeviceMemory();

  void* allocate(std::size_t size);  // throws std::bad_alloc
  bool release(void* p);             // false: p is not the start of an allocation
  std::optional<MemoryRange> find(const void* p) const;
  // The whole of [p, p + size) lies in one allocation.
  bool holds(const void* p, std::size_t size) const;
  std::size_t bytes_in_use() const;

 private:
  mutable std::mutex mutex_;
  std::map<const char*, std::size_t> ranges_;
  std::size_t in_use_ = 0;
};

}  // namespace strata::emulation
