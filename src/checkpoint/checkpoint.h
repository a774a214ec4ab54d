#pragma once
// Reading a checkpoint: its index, and any range of its state gathered from the parts into host memory. The
// format is described in checkpoint/manifest.h.
//
//   Checkpoint c("runs/a/checkpoints/step_00001000");
//   for (const ParameterSpec* p : c.parameters()) std::vector<float> w = c.parameter(p->name, group);
//
// Every byte handed out has been compared with its checksum. All failures throw DataError naming the file.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/units.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "sharding/mesh.h"

namespace strata {

// Stored elements (fp32 or bf16, packed, of any alignment) as fp32.
std::vector<float> widen(std::span<const std::byte> bytes, DType dtype);

class Checkpoint {
 public:
  // Opens a checkpoint's folder: reads the manifest and checks that the pieces cover every unit. Parts are
  // opened when they are needed.
  explicit Checkpoint(const std::filesystem::path& folder);
  // The same with a manifest that was read elsewhere (on one rank, for all).
  Checkpoint(std::filesystem::path folder, CheckpointManifest manifest);

  const std::filesystem::path& folder() const { return folder_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  std::int64_t step() const { return manifest_.step; }
  std::int64_t sequences_consumed() const { return manifest_.sequences_consumed; }
  const Config& config() const { return manifest_.config; }
  const LlamaConfig& model() const { return manifest_.config.model; }
  Mesh mesh() const { return Mesh(manifest_.config.mesh); }
  // Different models it holds: 1, or F between aggregations.
  int groups() const;

  const std::vector<UnitSpec>& units() const { return units_; }
  // All parameters in the model's order; names and shapes are Hugging Face's. They live as long as this.
  std::vector<const ParameterSpec*> parameters() const;
  // Of the stored weights: fp32 (master), or bf16 (bf16_pure).
  DType parameter_dtype() const;

  // A whole parameter as numbers (bf16 is widened exactly). group: 0 ... groups() - 1.
  std::vector<float> parameter(const std::string& name, int group = 0) const;
  // A whole parameter's bytes in parameter_dtype().
  std::vector<std::byte> parameter_bytes(const std::string& name, int group = 0) const;
  // The mean over groups, added in fp64 and rounded once to fp32.
  std::vector<float> average_parameter(const std::string& name) const;

  // Any state: `count` elements of a unit's flat buffer from `begin` on, in the kind's dtype. With a kind
  // that is stored once, every group has the same.
  std::vector<std::byte> read(const std::string& kind, int unit, int group, std::int64_t begin,
                              std::int64_t count) const;
  bool has(const std::string& kind, int unit) const;

  // Reads everything and compares it with its checksums.
  void verify() const;
  std::uint64_t bytes() const;  // of all parts

 private:
  struct Place {  // of a piece
    int part = 0;
    const CheckpointPiece* piece = nullptr;
  };
  using Key = std::pair<std::string, std::pair<int, int>>;  // kind, unit, group

  void index();
  std::string path_of(int part) const { return (folder_ / manifest_.parts[part].file).string(); }
  const SafetensorsFile& open(int part) const;
  // The piece's bytes, verified once.
  std::span<const std::byte> bytes_of(const Place& place) const;
  std::pair<int, const ParameterSpec*> find_parameter(const std::string& name) const;

  std::filesystem::path folder_;
  CheckpointManifest manifest_;
  std::vector<UnitSpec> units_;
  std::map<Key, std::vector<Place>> places_;  // by first element
  mutable std::map<int, SafetensorsFile> open_;
  mutable std::set<const CheckpointPiece*> verified_;
};

}  // namespace strata
