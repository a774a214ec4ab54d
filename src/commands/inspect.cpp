#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/folder.h"
#include "commands/commands.h"
#include "model/parameter_table.h"
#include "train/run_folder.h"
#include "train/status.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

void row(const char* name, const std::string& value) {
  fmt::print("  {:<20}{}\n", name, value);
}

void print_checkpoint(const fs::path& path, bool verify) {
  const Checkpoint c(path);
  const CheckpointManifest& m = c.manifest();
  fmt::print("checkpoint {}\n", path.string());
  row("step", fmt::format("{} of {}", m.step, m.config.schedule.steps));
  row("tokens", fmt::format("{}", m.tokens));
  row("sequences consumed",
      fmt::format("{} ({:.3f} epochs of {})", m.sequences_consumed,
                  static_cast<double>(m.sequences_consumed) / static_cast<double>(m.data_sequences),
                  m.data_sequences));
  row("mesh", c.mesh().describe());
  row("precision", m.config.precision);
  row("models", c.groups() == 1
                    ? (c.mesh().federate() == 1 ? "one" : "one: all federation groups hold the same")
                    : fmt::format("{}: one a federation group, between two aggregations", c.groups()));
  row("parameters", fmt::format("{} in {} units", parameter_count(c.units()), c.units().size()));
  for (const CheckpointKind& kind : m.kinds)
    row(kind.name.c_str(),
        fmt::format("{}{}", name_of(kind.dtype),
                    kind.groups > 1 ? fmt::format(", for each of {} groups", kind.groups) : ""));
  row("size", fmt::format("{} bytes in {} parts", c.bytes(), m.parts.size()));
  if (verify) {
    c.verify();
    row("integrity", "every byte agrees with its checksum");
  }
  fmt::print("parameters\n");
  for (const ParameterSpec* p : c.parameters()) {
    std::string shape;
    for (const std::int64_t n : p->shape) shape += fmt::format("{}{}", shape.empty() ? "" : " x ", n);
    fmt::print("  {:<56}{} {}\n", p->name, name_of(c.parameter_dtype()), shape);
  }
}

// The last line of the metrics for each split.
void print_metrics(const RunFolder& run) {
  nlohmann::json last, validation;
  std::ifstream in(run.metrics());
  for (std::string text; std::getline(in, text) && !in.eof();) {
    const auto j = nlohmann::json::parse(text, nullptr, false);
    if (!j.is_object()) continue;
    (j.value("split", "") == "train" ? last : validation) = j;
  }
  const auto shown = [](const nlohmann::json& j, const char* key) {
    if (!j.contains(key)) return std::string("?");
    return j[key].is_number_float() ? fmt::format("{:.6g}", j[key].get<double>()) : j[key].dump();
  };
  if (last.is_null()) return row("metrics", "none yet");
  row("last step", fmt::format("{}: loss {}, lr {}, {} tokens so far, {} tokens/s", shown(last, "step"),
                               shown(last, "loss"), shown(last, "lr"), shown(last, "tokens"),
                               shown(last, "tokens_per_second")));
  if (!validation.is_null())
    row("last validation",
        fmt::format("step {}: loss {}", shown(validation, "step"), shown(validation, "loss")));
}

// True when all its checkpoints can be used.
bool print_run(const fs::path& path, bool verify) {
  const RunFolder run{path.string()};
  bool good = true;
  fmt::print("run {}\n", path.string());
  print_metrics(run);
  const auto all = list_checkpoints(run.checkpoints());
  if (all.empty()) row("checkpoints", "none");
  for (const CheckpointFolder& c : all) {
    try {
      const Checkpoint checkpoint(c.path);
      if (verify) checkpoint.verify();
      row("checkpoint",
          fmt::format("{}: {} tokens, {} bytes{}{}", c.path.filename().string(), checkpoint.manifest().tokens,
                      checkpoint.bytes(),
                      checkpoint.groups() > 1 ? fmt::format(", {} models", checkpoint.groups()) : "",
                      verify ? ", verified" : ""));
    } catch (const DataError& e) {
      row("checkpoint", fmt::format("{}: DAMAGED: {}", c.path.filename().string(), e.what()));
      good = false;
    }
  }
  const auto status = read_status(run.status());
  if (!status.empty()) fmt::print("ranks\n{}", describe_status(status));
  return good;
}

}  // namespace

ExitCode inspect_command(const std::string& path, bool verify) {
  std::error_code error;
  const fs::path folder = fs::path(path).lexically_normal();
  const RunFolder run{folder.string()};
  if (fs::exists(folder / kManifestFile, error)) {
    print_checkpoint(folder, verify);
    return ExitCode::done;
  }
  if (is_run_folder(run)) return print_run(folder, verify) ? ExitCode::done : ExitCode::data;
  throw UsageError(
      fmt::format("{} is neither a checkpoint nor a run folder -> give a folder with {} or metrics.jsonl",
                  path, kManifestFile));
}

}  // namespace strata
