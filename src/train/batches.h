#pragma once
// A rank's micro-batches: read in the global order, uploaded ahead of the compute that uses them.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/device.h"
#include "data/dataset.h"

namespace strata {

// Which sequences a reader takes. Reader g of `readers` takes, in micro-step k of K, the batch_size sequences
// from position + (k * readers + g) * batch_size on.
struct BatchShape {
  std::int64_t batch_size = 1, sequence_length = 0, micro_steps = 1;
  std::int64_t readers = 1, reader = 0;
  std::int64_t sequences_per_step() const { return micro_steps * readers * batch_size; }
};

// One step's data in device memory.
struct StepBatch {
  std::vector<const std::int32_t*> tokens, targets;  // by micro-step: (B*T) int32
  const double* target_tokens = nullptr;  // fp64 in device memory: unmasked targets of all micro-steps
  std::int64_t host_target_tokens = 0;
};

class Batches {
 public:
  Batches(Device& device, const SequenceReader& reader, const BatchShape& shape);
  // What the constructor allocates, on the device and on the host.
  static std::size_t bytes(const BatchShape& shape);
  // Reads the step that starts at global position `position` and enqueues its upload on `compute`. The result
  // is valid until the call after the next one.
  StepBatch next(Stream& compute, std::int64_t position);

 private:
  struct Slot {
    Buffer host, device;  // tokens and targets of K micro-steps, then the count
    Event uploaded;
  };
  Device& device_;
  const SequenceReader& reader_;
  BatchShape shape_;
  std::vector<Slot> slots_;
  std::size_t turn_ = 0;
};

}  // namespace strata
