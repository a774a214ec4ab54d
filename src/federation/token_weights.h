#pragma once
// Token counts by federation group, as the weights of aggregations.
#include <cstdint>
#include <vector>

#include "backend/device.h"
#include "federation/aggregator.h"
#include "sharding/mesh.h"

namespace strata {

class TokenWeights {
 public:
  // Allocates nothing unless `enabled`.
  TokenWeights(const MeshGroups& groups, Device& device, int fragments, bool enabled);

  // Tokens of this rank since each fragment's last aggregation.
  void add(std::int64_t tokens);
  std::vector<std::int64_t>& counts() { return counts_; }
  const std::vector<std::int64_t>& counts() const { return counts_; }

  // Starts adding up the counts over this federation group and gathering those of its peers
  // (Traffic::control).
  void exchange(std::int64_t step);
  // The weights of a fragment that is sent now; starts its count anew. The host waits for the exchange. Equal
  // weights when not enabled, or when no group has seen a token. Throws InternalError when exchange was not
  // called for this step.
  Aggregator::Weights take(int fragment, std::int64_t step);
  // Work enqueued on the fragment's behalf has read the weights once this event, too, is complete.
  void used(int fragment, const Event& event);

 private:
  const MeshGroups& groups_;
  Device& device_;
  bool enabled_;
  int fragments_;
  std::vector<std::int64_t> counts_;
  Stream* stream_ = nullptr;
  Buffer local_, gathered_, weights_;                 // device: (P), (F, P) fp64; (P, F) int64
  Buffer host_local_, host_gathered_, host_weights_;  // the same on the host
  Event exchanged_, copied_;
  std::vector<std::vector<Event>> used_;  // by fragment
  std::int64_t exchanged_step_ = -1;
};

// Bytes that TokenWeights allocates (Purpose::outer).
std::size_t token_weights_bytes(int federate, int fragments);

}  // namespace strata
