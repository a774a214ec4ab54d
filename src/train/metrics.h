#pragma once
// metrics.jsonl: one JSON object a line and step, the record that plots and comparisons are made from.
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include "backend/device.h"

namespace strata {

// Seconds of a step. Exclusive: data + forward + backward + optimizer + aggregation = total. `aggregation` is
// what the compute stream waited for: the exposed part.
struct PhaseSeconds {
  double data = 0, forward = 0, backward = 0, optimizer = 0, aggregation = 0, total = 0;
};

// Bytes this rank received in the step.
struct StepBytes {
  std::int64_t shard_all_gather = 0, shard_reduce_scatter = 0;
  std::int64_t replicate_all_reduce = 0, replicate_broadcast = 0;
  std::int64_t federate_all_reduce = 0;
};

struct TrainRecord {
  std::int64_t step = 0;
  double loss = 0;  // token-weighted mean over the world
  double perplexity_rank_mean =
      0;  // mean over ranks of exp(local mean loss): the curve of the paper's Figure 2
  double lr = 0;
  double grad_norm = 0;      // mean over federation groups
  double grad_norm_max = 0;  // and their maximum
  std::int64_t tokens = 0;   // seen by the world since step 1
  double tokens_per_second = 0;
  std::optional<double> mfu;  // empty when the peak is unknown
  PhaseSeconds time;
  StepBytes bytes;
  double aggregation_busy = 0;  // seconds in which aggregations were at work, hidden or not
  bool aggregated = false;
  std::size_t memory_peak_bytes = 0;
};

struct ValidationRecord {
  std::int64_t step = 0;
  double loss = 0;                    // mean over federation groups when they differ
  std::optional<double> loss_spread;  // maximum - minimum over groups; empty when all groups hold one model
  std::int64_t tokens = 0;            // target tokens evaluated
  double seconds = 0;
};

// Rank 0's writer; the others hold one without a file. A line is written and flushed whole.
class MetricsWriter {
 public:
  MetricsWriter() = default;
  // Opens path for appending after dropping every line of a step past `last_step` and any torn last line;
  // last_step 0 starts the file anew. Throws DataError when the file cannot be written.
  MetricsWriter(const std::string& path, std::int64_t last_step);
  void write(const TrainRecord& record);
  void write(const ValidationRecord& record);
  // Flushes what was written to the disk.
  void sync();

 private:
  void line(const std::string& text);
  std::string path_;
  std::ofstream file_;
};

}  // namespace strata
