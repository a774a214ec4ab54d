#include "federation/fragments.h"

#include <algorithm>

namespace strata {

Fragments::Fragments(const std::vector<UnitSpec>& units, const FederationOptions& options)
    : options_(options) {
  const bool streaming = options.schedule == FederationSchedule::streaming;
  const auto layers = std::count_if(units.begin(), units.end(),
                                    [](const UnitSpec& u) { return u.kind == UnitKind::decoder; });
  const std::int64_t fragments =
      streaming ? std::max<std::int64_t>(1, (layers + options.fragment_layers - 1) / options.fragment_layers)
                : 1;
  units_.resize(static_cast<std::size_t>(fragments));
  std::int64_t layer = 0;
  for (int u = 0; u < static_cast<int>(units.size()); ++u) {
    std::int64_t fragment = 0;
    const UnitKind kind = units[static_cast<std::size_t>(u)].kind;
    if (kind == UnitKind::decoder) fragment = layer++ % fragments;
    if (kind == UnitKind::head) fragment = fragments - 1;
    units_[static_cast<std::size_t>(fragment)].push_back(u);
  }
}

int Fragments::units_before(int fragment) const {
  int units = 0;
  for (int p = 0; p < fragment; ++p) units += static_cast<int>(units_[static_cast<std::size_t>(p)].size());
  return units;
}

// Fragment p of P has its step at (p + 1) / P of the way through every round.
bool Fragments::regular(int fragment, std::int64_t step) const {
  const std::int64_t offset = (fragment + 1) * options_.every / count();
  return step >= 1 && step % options_.every == offset % options_.every;
}

bool Fragments::sent(int fragment, std::int64_t step) const {
  return step == options_.last_step || regular(fragment, step);
}

bool Fragments::applied(int fragment, std::int64_t step) const {
  if (options_.schedule != FederationSchedule::streaming) return sent(fragment, step);
  if (step == options_.last_step) return in_flight(fragment, step - 1);
  return options_.tau > 0 && regular(fragment, step - options_.tau);
}

bool Fragments::in_flight(int fragment, std::int64_t step) const {
  if (options_.schedule != FederationSchedule::streaming || step == options_.last_step) return false;
  for (std::int64_t s = std::max<std::int64_t>(1, step - options_.tau + 1); s <= step; ++s)
    if (regular(fragment, s)) return true;
  return false;
}

}  // namespace strata
