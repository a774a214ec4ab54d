#pragma once
// Which units aggregate after which step.
#include <cstdint>
#include <vector>

#include "backend/units.h"
#include "federation/options.h"

namespace strata {

// Units that aggregate together. Without streaming there is one fragment, with all units. With streaming the
// decoder layers are dealt out in strides (layer i belongs to fragment i mod P), so that every fragment spans
// the depth of the model; the first edge unit goes with the first fragment, the head with the last.
class Fragments {
 public:
  Fragments(const std::vector<UnitSpec>& units, const FederationOptions& options);

  int count() const { return static_cast<int>(units_.size()); }
  const std::vector<int>& units(int fragment) const { return units_[static_cast<std::size_t>(fragment)]; }
  // Units of all fragments, and of those before `fragment`.
  int total_units() const { return units_before(count()); }
  int units_before(int fragment) const;

  // True when the fragment is sent after `step`: at its own step of every `every`, and after the last step.
  bool sent(int fragment, std::int64_t step) const;
  // True when a fragment sent earlier is applied after `step`.
  bool applied(int fragment, std::int64_t step) const;
  // True when the fragment was sent after or before `step` and is not applied yet once `step` is over.
  bool in_flight(int fragment, std::int64_t step) const;

 private:
  bool regular(int fragment, std::int64_t step) const;

  FederationOptions options_;
  std::vector<std::vector<int>> units_;
};

}  // namespace strata
