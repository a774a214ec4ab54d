// What a report says: threads, places, addresses, and who waits where.
#include "cuda/emulation/executor.h"

#include <cinttypes>
#include <cstdio>
#include <map>
#include <tuple>

namespace strata::emulation {

namespace {

std::string format_hex(std::uint64_t value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%0*" PRIx64, digits, value);
  return text;
}

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

uint3 coordinates(std::uint64_t linear, dim3 extent) {
  return {static_cast<unsigned>(linear % extent.x), static_cast<unsigned>(linear / extent.x % extent.y),
          static_cast<unsigned>(linear / extent.x / extent.y)};
}

const char* name_of(Access kind) {
  switch (kind) {
    case Access::read:
      return "read";
    case Access::write:
      return "write";
    case Access::atomic:
      return "atomic update";
    case Access::copying:
      return "cp.async write";
  }
  return "";
}

// "0-31, 40": the numbers as ranges.
std::string ranges(const std::vector<unsigned>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(numbers[i]);
    if (end - i > 1) text += "-" + std::to_string(numbers[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace

std::string format_where(Where where) {
  return std::string(where.file) + ":" + std::to_string(where.line);
}

std::string describe_mask(unsigned mask) {
  return format_hex(mask, 8);
}

std::string Executor::describe_thread(unsigned i) const {
  const uint3 t = threads_[i].index;
  const uint3 b = coordinates(block_, launch_->grid);
  return "thread " + triple(t.x, t.y, t.z) + " of block " + triple(b.x, b.y, b.z);
}

std::string Executor::describe_launch() const {
  const dim3 g = launch_->grid;
  const dim3 b = launch_->block;
  return "in " + std::string(launch_->name) + " launched at " + format_where(launch_->where) + " with grid " +
         triple(g.x, g.y, g.z) + ", block " + triple(b.x, b.y, b.z) + ", " +
         std::to_string(launch_->dynamic_shared_bytes) + " bytes of dynamic shared memory";
}

std::string Executor::describe_address(const void* p) const {
  const auto* c = static_cast<const char*>(p);
  for (const SharedBuffer& buffer : shared_) {
    // A little past the end still names the buffer that was overrun.
    if (c >= buffer.begin && c < buffer.begin + buffer.bytes + 256) {
      return "byte " + std::to_string(c - buffer.begin) + " of `" + buffer.name + "` (shared, " +
             std::to_string(buffer.bytes) + " bytes)";
    }
  }
  const auto address = reinterpret_cast<std::uint64_t>(p);
  for (const std::ptrdiff_t back : {0, 256, 1024}) {
    if (const auto range = DeviceMemory::instance().find(c - back); range && c - range->begin < PTRDIFF_MAX) {
      return "byte " + std::to_string(c - range->begin) + " of the device allocation of " +
             std::to_string(range->size) + " bytes at " +
             format_hex(reinterpret_cast<std::uint64_t>(range->begin), 12);
    }
  }
  return "address " + format_hex(address, 12) + " (in no device allocation)";
}

std::string Executor::describe_deadlock() const {
  std::map<std::tuple<std::string, std::string, unsigned>, std::vector<unsigned>> waiting;
  std::vector<unsigned> exited;
  for (unsigned i = 0; i < thread_count_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == ThreadState::finished) {
      exited.push_back(i);
    } else {
      waiting[{thread.waits_for, format_where(thread.waits_at), thread.mask}].push_back(i);
    }
  }
  const uint3 b = coordinates(block_, launch_->grid);
  std::string text = "deadlock in block " + triple(b.x, b.y, b.z) + ":";
  for (const auto& [what, threads] : waiting) {
    const auto& [name, where, mask] = what;
    text += "\n  threads " + ranges(threads) + " wait in " + name + " at " + where;
    if (mask != 0) text += " with the mask " + describe_mask(mask);
  }
  if (!exited.empty()) text += "\n  threads " + ranges(exited) + " have exited";
  return text;
}

void Executor::note_race(const RaceDetector::Finding& finding) {
  const std::string here = std::string(name_of(finding.kind)) + " by " + describe_thread(finding.thread) +
                           " at " + race_->describe(finding.site);
  if (finding.out_of_bounds) {
    findings_.push_back("out of bounds: " + here + ": " + std::to_string(finding.bytes) + " bytes at " +
                        describe_address(finding.address));
  } else {
    const uint3 t = threads_[finding.other_thread].index;
    const uint3 b = coordinates(finding.other_block, launch_->grid);
    findings_.push_back("race on " + describe_address(finding.address) + ":\n  " + here + "\n  " +
                        name_of(finding.other_kind) + " by thread " + triple(t.x, t.y, t.z) + " of block " +
                        triple(b.x, b.y, b.z) + " at " + race_->describe(finding.other_site) +
                        (finding.other_kind == Access::copying || finding.kind == Access::copying
                             ? "\n  no cp_async_wait, or none followed by a barrier, is between them"
                             : "\n  nothing orders the two"));
  }
  if (race_->full()) stop("stopped after " + std::to_string(findings_.size()) + " findings");
}

}  // namespace strata::emulation
