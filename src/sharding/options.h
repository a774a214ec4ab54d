#pragma once
// How the engine stores and moves a model: dtypes, prefetch, accumulation.
#include <string>

#include "backend/communicator.h"
#include "base/dtype.h"
#include "config/config.h"

namespace strata {

struct Precision {
  DType master = DType::f32;    // parameters and moments as the optimizer sees them
  DType compute = DType::f32;   // what is gathered and leased
  DType gradient = DType::f32;  // gradient shards
  DType wire = DType::f32;      // gradients in reductions
  bool has_compute_copy() const { return master != compute; }

  // precision: fp32 | bf16 | bf16_pure; reduce_dtype: fp32 | bf16. Throws UsageError on anything else.
  static Precision from(const std::string& precision, const std::string& reduce_dtype);
};

struct EngineOptions {
  Precision precision;
  int prefetch = 1;                   // units gathered ahead of the one in use
  bool reshard_after_forward = true;  // false: decoder weights stay gathered until their backward
  bool accumulate_full = false;       // full-size gradients over the micro-steps, reduced once
  bool moments = true;                // AdamW's m and v; SGD has none
  int micro_steps = 1;                // K, gradient accumulation
  ReduceOptions reduce;               // rounding of gradient reductions

  static EngineOptions from(const Config& config);
};

}  // namespace strata
