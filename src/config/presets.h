#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace strata {

struct ModelPreset {
  std::string name;
  LlamaConfig model;
};

const std::vector<ModelPreset>& model_presets();
const ModelPreset* find_preset(std::string_view name);  // nullptr: no such preset

}  // namespace strata
