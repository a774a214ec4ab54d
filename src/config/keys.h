#pragma once
// The table of all configuration keys. The parser, --set, the resolved configuration and the reference in the
// README all come from it.
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "config/json.h"

namespace strata {

struct Key {
  enum class Type { integer, number, boolean, string, strings, list, object };

  std::string path;  // "optimizer.lr"
  Type type = Type::integer;
  std::string allowed;  // what the type alone does not say: "above 0", "fp32 | bf16"
  std::string doc;      // one line
  bool required = false;
  bool nullable = false;        // null stands for "not set"
  bool names_model = false;     // preset or path: stands for other keys of the model
  std::string derived_default;  // said in place of the default when it depends on other keys
  // Stores a value. Returns false when its type or value is not allowed; then nothing is stored.
  std::function<bool(Config&, const Json&)> read;
  std::function<Json(const Config&)> write;  // null when not set
};

const std::vector<Key>& keys();

// The row of a path, or nullptr.
const Key* find_key(std::string_view path);
// True when keys lie below it: "optimizer".
bool is_section(std::string_view path);
// The known key or section that looks most like `path` (Levenshtein distance), or "" when none is near.
std::string nearest_key(std::string_view path);
// "a number above 0", "one of fp32 | bf16".
std::string describe_allowed(const Key&);
// The table as Markdown.
std::string config_reference();

}  // namespace strata
