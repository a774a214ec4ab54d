#include <fmt/format.h>

#include "base/log.h"
#include "checkpoint/hf_export.h"
#include "commands/model.h"
#include "model/parameter_table.h"

namespace strata {

ExitCode export_command(const ExportArguments& a) {
  const Checkpoint checkpoint = open_checkpoint(a.checkpoint.path);
  const CheckpointWeights weights(checkpoint, a.checkpoint.choice);
  HfExportOptions options;
  options.dtype = a.dtype.empty() ? weights.dtype() : a.dtype == "bf16" ? DType::bf16 : DType::f32;
  options.largest_file = a.largest_file;
  options.tokenizer.assign(a.tokenizer.begin(), a.tokenizer.end());
  export_hf(weights, a.out, options);
  log_info("{}: step {}, {} parameters as {} in {}", checkpoint.folder().string(), checkpoint.step(),
           parameter_count(weights.units()), name_of(options.dtype), a.out);
  return ExitCode::done;
}

}  // namespace strata
