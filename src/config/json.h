#pragma once
// Strict reading of JSON text: what nlohmann/json lets through and a configuration must not contain is
// refused with the place where it stands.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace strata {

using Json = nlohmann::ordered_json;

// Parses `text`. Throws UsageError naming `source` and the key's path (or line and column) for syntax errors,
// trailing text, invalid UTF-8, a key given twice, numbers that overflow (1e400), integers past 2^63 - 1 and
// nesting deeper than 32.
Json parse_json(std::string_view text, const std::string& source);

// Reads a whole file of at most 1 MiB. Throws UsageError.
std::string read_text_file(const std::string& path, const std::string& what);

// The value as it stands in messages: one line, cut to a readable length.
std::string show(const Json& value);

}  // namespace strata
