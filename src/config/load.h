#pragma once
// From JSON to a validated Config and back.
#include <string>
#include <vector>

#include "config/config.h"

namespace strata {

// Reads a configuration. `sets` are the texts of --set, "a.b.c=value", applied in order. Everything that is
// unknown, of a wrong type, impossible or inconsistent throws UsageError with the key's path, the value, what
// is allowed and, for unknown keys, the nearest known one. Paths in it are relative to the current directory.
Config load_config(const std::string& path, const std::vector<std::string>& sets = {});
// The same from text; `source` stands in messages in place of the file name.
Config read_config(const std::string& text, const std::string& source,
                   const std::vector<std::string>& sets = {});

// A Hugging Face config.json alone: the model it describes. Throws UsageError like the readers above.
LlamaConfig load_model_config(const std::string& path);

// The rules that involve more than one key. Called by the readers above; throws UsageError.
void check_config(const Config& config, const std::string& source);

// The resolved configuration: every key, the model inline. Reading it back gives an equal Config.
std::string write_config(const Config& config);

}  // namespace strata
