#pragma once
// Small units for tests that need no model.
#include <string>
#include <vector>

#include "backend/units.h"

namespace strata {

// A unit whose parameters have the given sizes; the last one is a norm.
inline UnitSpec make_unit(const std::string& name, UnitKind kind, const std::vector<std::int64_t>& sizes) {
  UnitSpec unit;
  unit.name = name;
  unit.kind = kind;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    ParameterSpec p;
    p.name = name + ".parameter." + std::to_string(i);
    p.shape = {sizes[i]};
    p.offset = unit.elements;
    p.count = sizes[i];
    p.is_norm = i + 1 == sizes.size();
    p.initial_std = p.is_norm ? 0.0f : 0.02f;
    unit.elements += p.count;
    unit.parameters.push_back(p);
  }
  return unit;
}

// embedding, `layers` decoder units and head; or root and decoder units. Sizes that no shard size divides.
inline std::vector<UnitSpec> make_units(int layers, bool tied) {
  std::vector<UnitSpec> units;
  units.push_back(tied ? make_unit("root", UnitKind::root, {997 * 8, 8})
                       : make_unit("embedding", UnitKind::embedding, {997 * 8}));
  for (int i = 0; i < layers; ++i)
    units.push_back(make_unit("decoder." + std::to_string(i), UnitKind::decoder, {64, 120, 64, 24, 8}));
  if (!tied) units.push_back(make_unit("head", UnitKind::head, {997 * 8, 8}));
  return units;
}

}  // namespace strata
