#include "train/batches.h"

#include <algorithm>
#include <span>

namespace strata {
namespace {

constexpr std::size_t kSlots = 2;  // one in use, one being filled

std::size_t slot_bytes(const BatchShape& shape) {
  const auto values =
      static_cast<std::size_t>(2 * shape.micro_steps * shape.batch_size * shape.sequence_length);
  return sizeof(double) + values * sizeof(std::int32_t);
}

}  // namespace

std::size_t Batches::bytes(const BatchShape& shape) {
  return kSlots * 2 * slot_bytes(shape);
}

Batches::Batches(Device& device, const SequenceReader& reader, const BatchShape& shape)
    : device_(device), reader_(reader), shape_(shape), slots_(kSlots) {
  for (Slot& slot : slots_) {
    slot.host = device.allocate_host(slot_bytes(shape), Purpose::data);
    slot.device = device.allocate(slot.host.bytes(), Purpose::data);
  }
}

StepBatch Batches::next(Stream& compute, std::int64_t position) {
  Slot& slot = slots_[turn_++ % kSlots];
  device_.synchronize(slot.uploaded);  // the host buffer is read by the upload of two steps ago
  const std::int64_t B = shape_.batch_size, T = shape_.sequence_length;
  auto* host_count = slot.host.as<double>();
  auto* values = reinterpret_cast<std::int32_t*>(host_count + 1);
  const auto* on_device = reinterpret_cast<const std::int32_t*>(slot.device.as<double>() + 1);

  StepBatch out;
  for (std::int64_t k = 0; k < shape_.micro_steps; ++k) {
    std::int32_t* tokens = values + 2 * k * B * T;
    std::int32_t* targets = tokens + B * T;
    const std::int64_t first = position + (k * shape_.readers + shape_.reader) * B;
    const auto count = static_cast<std::size_t>(B * T);
    reader_.read(first, std::span(tokens, count), std::span(targets, count));
    out.host_target_tokens += std::count_if(targets, targets + B * T, [](std::int32_t t) { return t >= 0; });
    out.tokens.push_back(on_device + 2 * k * B * T);
    out.targets.push_back(on_device + 2 * k * B * T + B * T);
  }
  *host_count = static_cast<double>(out.host_target_tokens);
  out.target_tokens = slot.device.as<double>();
  device_.copy_to_device(compute, slot.device.data(), slot.host.data(), slot.host.bytes());
  slot.uploaded = device_.record(compute);
  return out;
}

}  // namespace strata
