#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "data/dataset.h"
#include "model/llama.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"
#include "train/batches.h"

namespace strata {

struct EvaluationResult {
  double loss = 0;                    // mean token loss; mean over federation groups when their models differ
  std::optional<double> loss_spread;  // maximum - minimum over groups; empty when there is one model
  std::int64_t tokens = 0;            // target tokens of the evaluated sequences
  double seconds = 0;
};

// Forward passes over the first `sequences` sequences of the reader, the same set on every mesh. With
// one_model the world shares them out; otherwise every federation group evaluates its own model on all of
// them. Collective over the world; leaves weights, moments and the sampler's position alone.
class Evaluator {
 public:
  Evaluator(Device& device, Stream& compute, Llama& model, ShardingEngine& engine, const MeshGroups& groups,
            const SequenceReader& reader, std::int64_t sequences);
  EvaluationResult run(std::int64_t step, bool one_model);

 private:
  Device& device_;
  Stream& compute_;
  Stream& transfer_;
  Llama& model_;
  ShardingEngine& engine_;
  const MeshGroups& groups_;
  const SequenceReader& reader_;
  std::int64_t sequences_;
  Buffer host_, batch_, sums_, sums_host_;  // sums: {loss sum, target tokens} for each federation group
};

}  // namespace strata
