#include "sharding/options.h"

#include <fmt/format.h>

#include "base/error.h"

namespace strata {

Precision Precision::from(const std::string& precision, const std::string& reduce_dtype) {
  Precision p;
  if (precision == "bf16") {
    p.compute = DType::bf16;
  } else if (precision == "bf16_pure") {
    p.master = p.compute = p.gradient = DType::bf16;
  } else if (precision != "fp32") {
    throw UsageError(
        fmt::format("precision is \"{}\", allowed are fp32, bf16, bf16_pure -> choose one", precision));
  }
  if (reduce_dtype == "bf16") {
    p.wire = DType::bf16;
  } else if (reduce_dtype != "fp32") {
    throw UsageError(
        fmt::format("reduce_dtype is \"{}\", allowed are fp32, bf16 -> choose one", reduce_dtype));
  }
  return p;
}

EngineOptions EngineOptions::from(const Config& config) {
  EngineOptions o;
  o.precision = Precision::from(config.precision, config.reduce_dtype);
  o.prefetch = config.prefetch;
  o.reshard_after_forward = config.reshard_after_forward;
  o.accumulate_full = config.accumulate == "full";
  o.moments = config.optimizer.kind == "adamw";
  o.micro_steps = static_cast<int>(config.gradient_accumulation);
  o.reduce.rounding = config.reduce_rounding == "hop" ? ReduceRounding::hop : ReduceRounding::once;
  o.reduce.imitate_hops = config.reduce_imitate_hops;
  return o;
}

}  // namespace strata
