#pragma once
// Whole models as numbers, wherever they are stored: what import, export and evaluation read from.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "backend/device.h"
#include "backend/units.h"
#include "checkpoint/checkpoint.h"
#include "config/config.h"
#include "sharding/engine.h"

namespace strata {

class ModelWeights {
 public:
  virtual ~ModelWeights() = default;
  virtual const LlamaConfig& model() const = 0;
  virtual const std::vector<UnitSpec>& units() const = 0;  // llama_units(model())
  // fp32 or bf16, whichever holds every stored number exactly.
  virtual DType dtype() const = 0;
  // `count` elements of a unit's flat buffer from `begin` on, as fp32. Throws DataError naming the file.
  virtual std::vector<float> values(int unit, std::int64_t begin, std::int64_t count) const = 0;
};

// One model of a checkpoint. Between aggregations a checkpoint holds one for each federation group.
class CheckpointWeights final : public ModelWeights {
 public:
  struct Choice {
    std::optional<int> group;
    bool average = false;  // the mean over groups, added in fp64 and rounded once to fp32
  };
  // Throws UsageError when there are several models and no choice was made, or the group does not exist.
  CheckpointWeights(const Checkpoint& checkpoint, const Choice& choice);

  const LlamaConfig& model() const override { return checkpoint_.model(); }
  const std::vector<UnitSpec>& units() const override { return checkpoint_.units(); }
  DType dtype() const override;
  std::vector<float> values(int unit, std::int64_t begin, std::int64_t count) const override;

 private:
  const Checkpoint& checkpoint_;
  Choice choice_;
};

// Sets the parameters of this rank's shards, rounded to the engine's dtype, and what is gathered from them.
// Each rank reads only what it holds. The engine's units are those of `weights`.
void load_weights(const ModelWeights& weights, ShardingEngine& engine, Device& device, Stream& compute);

}  // namespace strata
