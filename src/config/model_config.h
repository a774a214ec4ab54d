#pragma once
// The "model" section: presets, Hugging Face's config.json and overrides become one object with the keys of
// the table; and the rules a Llama must obey.
#include <optional>
#include <string>

#include "config/config.h"
#include "config/json.h"

namespace strata {

// Replaces {"preset": ...} and {"path": ...} by the values they stand for, lets the keys beside them override
// these, drops Hugging Face's keys that do not matter here and brings `rope_parameters` into the form
// rope_theta + rope_scaling. Throws UsageError for what would change the mathematics.
Json expand_model(const Json& model, const std::string& source);

// Fills sizes that were left out from the others, then refuses impossible shapes. Throws UsageError.
void finish_model(LlamaConfig& model, std::int64_t sequence_length, const std::string& source);

// False when the value is not allowed; `out` is untouched then.
bool read_rope_scaling(const Json& value, std::optional<RopeScaling>& out);
Json write_rope_scaling(const std::optional<RopeScaling>& scaling);

}  // namespace strata
