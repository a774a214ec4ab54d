#pragma once
// The index of a checkpoint, manifest.json: what training state it is and where every piece of it lies.
//
// A checkpoint is a folder, step_00001000/:
//   manifest.json               this index; it carries a checksum of itself
//   part_00000.safetensors ...  one file for each rank that had something to write, named by its mesh
//   position
//
// State is stored by *kind*: parameter (fp32 master, or the bf16 weights of bf16_pure), m and v (AdamW),
// theta_old, momentum, error (outer optimizer) and delta (streaming fragments in flight). A kind of a unit is
// the unit's flat buffer without padding (units and their parameters follow from the model's configuration,
// model/parameter_table.h), cut into pieces of consecutive elements, one for each shard of the mesh that
// wrote it. A kind whose values are equal in all federation groups is stored once (groups = 1), else once a
// group. A piece is the tensor "<kind>.<unit>" (count) of a part, with a checksum here.
//
// Random numbers need no state: they are keyed by (seed, purpose, parameter, element, step).
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "config/config.h"

namespace strata {

// The kinds that are more than a name to somebody.
namespace kind {
constexpr const char* parameter = "parameter";
constexpr const char* m = "m";
constexpr const char* v = "v";
constexpr const char* error = "error";
constexpr const char* delta = "delta";
}  // namespace kind

struct CheckpointKind {
  std::string name;
  DType dtype = DType::f32;
  int groups = 1;  // 1: equal in all federation groups; else F
};

struct CheckpointPiece {
  std::string kind;
  int unit = 0;  // index into llama_units(config.model)
  int group = 0;
  std::int64_t begin = 0, count = 0;  // elements of the unit's flat buffer
  std::string checksum;
};

struct CheckpointPart {
  std::string file;
  std::uint64_t bytes = 0;
  std::vector<CheckpointPiece> pieces;
};

struct CheckpointManifest {
  std::int64_t step = 0;
  std::int64_t sequences_consumed = 0;  // position in the global order of sequences
  std::int64_t tokens = 0;              // target tokens the world has trained on
  std::int64_t data_sequences = 0;      // N, sequences in an epoch
  bool aggregated = false;              // the groups aggregated after this step (always true with F = 1)
  Config config;                        // of the run that wrote it
  // Whatever else the training loop keeps, by name.
  std::map<std::string, std::int64_t> counters;
  // Target tokens since each fragment's last aggregation, by mesh position.
  std::vector<std::vector<std::int64_t>> token_counts;
  std::vector<CheckpointKind> kinds;
  std::vector<CheckpointPart> parts;

  const CheckpointKind* find_kind(const std::string& name) const;  // nullptr when there is none
};

constexpr const char* kManifestFile = "manifest.json";

// "parameter.decoder.3": the name of a piece inside its part.
std::string piece_name(const std::string& kind, const std::string& unit);

std::string write_manifest(const CheckpointManifest& manifest);
// Throws DataError naming `source` for anything that is not a manifest of this program, whole and unchanged.
CheckpointManifest read_manifest(const std::string& text, const std::string& source);

}  // namespace strata
