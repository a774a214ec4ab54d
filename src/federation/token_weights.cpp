#include "federation/token_weights.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace strata {

std::size_t token_weights_bytes(int federate, int fragments) {
  const auto f = static_cast<std::size_t>(federate), p = static_cast<std::size_t>(fragments);
  return 2 * (p + 2 * f * p) * sizeof(double);
}

TokenWeights::TokenWeights(const MeshGroups& groups, Device& device, int fragments, bool enabled)
    : groups_(groups),
      device_(device),
      enabled_(enabled),
      fragments_(fragments),
      counts_(static_cast<std::size_t>(fragments), 0),
      used_(static_cast<std::size_t>(fragments)) {
  if (!enabled_) return;
  stream_ = &device.create_stream("tokens", Device::StreamKind::transfer);
  const std::size_t one = counts_.size() * sizeof(double);
  const std::size_t all = one * static_cast<std::size_t>(groups.mesh.federate());
  local_ = device.allocate(one, Purpose::outer);
  gathered_ = device.allocate(all, Purpose::outer);
  weights_ = device.allocate(all, Purpose::outer);
  host_local_ = device.allocate_host(one, Purpose::outer);
  host_gathered_ = device.allocate_host(all, Purpose::outer);
  host_weights_ = device.allocate_host(all, Purpose::outer);
}

void TokenWeights::add(std::int64_t tokens) {
  for (std::int64_t& count : counts_) count += tokens;
}

void TokenWeights::exchange(std::int64_t step) {
  if (!enabled_) return;
  device_.synchronize(exchanged_);  // the host buffer of the exchange before is free: long done
  std::copy(counts_.begin(), counts_.end(), host_local_.as<double>());  // integers below 2^53 are exact
  const Flat mine{local_.data(), DType::f64, fragments_};
  const Flat all{gathered_.data(), DType::f64, mine.count * groups_.mesh.federate()};
  const CollectiveLabel label{Traffic::control, "token counts", step};
  device_.copy_to_device(*stream_, mine.data, host_local_.data(), host_local_.bytes());
  groups_.group->all_reduce_sum(*stream_, label, mine, {});
  groups_.federate->all_gather(*stream_, label, all, mine);
  device_.copy_to_host(*stream_, host_gathered_.data(), all.data, host_gathered_.bytes());
  exchanged_ = device_.record(*stream_);
  exchanged_step_ = step;
}

Aggregator::Weights TokenWeights::take(int fragment, std::int64_t step) {
  const auto p = static_cast<std::size_t>(fragment);
  counts_[p] = 0;
  if (!enabled_) return {};
  if (exchanged_step_ != step)
    throw InternalError(
        fmt::format("step {} aggregates by tokens, but its tokens were not counted -> call "
                    "count_tokens once a step, before after_step",
                    step));
  device_.synchronize(exchanged_);
  device_.synchronize(copied_);  // of an earlier aggregation: long done

  const int peers = groups_.mesh.federate();
  auto* row = host_weights_.as<std::int64_t>() + fragment * peers;
  for (int f = 0; f < peers; ++f)
    row[f] = static_cast<std::int64_t>(host_gathered_.as<double>()[f * fragments_ + fragment]);
  if (std::all_of(row, row + peers, [](std::int64_t w) { return w == 0; })) std::fill(row, row + peers, 1);

  auto* device_row = weights_.as<std::int64_t>() + fragment * peers;
  for (const Event& read : used_[p]) device_.wait(*stream_, read);
  used_[p].clear();
  device_.copy_to_device(*stream_, device_row, row, static_cast<std::size_t>(peers) * sizeof(std::int64_t));
  copied_ = device_.record(*stream_);
  return {device_row, row, copied_};
}

void TokenWeights::used(int fragment, const Event& event) {
  if (enabled_) used_[static_cast<std::size_t>(fragment)].push_back(event);
}

}  // namespace strata
