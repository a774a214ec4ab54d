#pragma once
// Full-size buffers that units take in turn. A slot is free on the host as soon as its user has enqueued the
// last use; the next user's stream waits for that use.
#include <cstdint>
#include <vector>

#include "backend/device.h"

namespace strata {

struct Slot {
  Buffer memory;
  bool edge = false;      // for edge units, which may be far larger than decoder layers
  int unit = -1;          // who occupies it, -1: nobody
  Event filled;           // its content is complete
  Event released;         // its last use is complete
  std::int64_t turn = 0;  // when it was given back
};

class SlotRing {
 public:
  void add(Buffer memory, bool edge) {
    Slot slot;
    slot.memory = std::move(memory);
    slot.edge = edge;
    slots_.push_back(std::move(slot));
  }
  // The slot that has been free for longest, or nullptr.
  Slot* take(int unit, bool edge) {
    Slot* oldest = nullptr;
    for (Slot& slot : slots_)
      if (slot.unit < 0 && slot.edge == edge && (oldest == nullptr || slot.turn < oldest->turn))
        oldest = &slot;
    if (oldest != nullptr) oldest->unit = unit;
    return oldest;
  }
  void give_back(Slot& slot, Event released) {
    slot.unit = -1;
    slot.released = std::move(released);
    slot.turn = ++turn_;
  }
  std::vector<Slot>& slots() { return slots_; }

 private:
  std::vector<Slot> slots_;
  std::int64_t turn_ = 0;
};

}  // namespace strata
