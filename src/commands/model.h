#pragma once
// `trainer export | import | evaluate`: models out, in, and measured.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/model_weights.h"

namespace strata {

// A checkpoint's folder, or a run's, which stands for its newest checkpoint.
struct CheckpointArguments {
  std::string path;
  CheckpointWeights::Choice choice;
};

struct ExportArguments {
  CheckpointArguments checkpoint;
  std::string out;
  std::string dtype;                   // fp32 | bf16; empty: as it is stored
  std::vector<std::string> tokenizer;  // files or folders
  std::uint64_t largest_file = 5'000'000'000;
};
// Writes a Hugging Face folder.
ExitCode export_command(const ExportArguments& arguments);

struct ImportArguments {
  std::string folder;             // Hugging Face's
  std::string config;             // file; its model is replaced by the folder's
  std::vector<std::string> sets;  // "a.b.c=value"; none of the model
};
// Makes a run folder with a checkpoint of step 0 that holds the folder's weights: training resumes from it,
// on any mesh. Every rank of the configured mesh calls it.
ExitCode import_command(const ImportArguments& arguments);

struct EvaluateArguments {
  CheckpointArguments checkpoint;  // this
  std::string hf;                  // or a Hugging Face folder
  std::vector<std::string> data;   // shards
  // Defaults: the checkpoint's configuration; for a Hugging Face folder fp32, one sequence at a time, as long
  // as the model allows, at most 2048.
  std::optional<std::int64_t> sequence_length, batch_size, ignore_token;
  std::optional<std::string> precision;
  std::optional<std::int64_t> sequences;  // how many, from the start; default all
  int threads = 1;
};
// Prints one JSON object: loss (mean over target tokens), perplexity, tokens, sequences. With many ranks,
// weights are sharded over all of them and the sequences are shared out.
ExitCode evaluate_command(const EvaluateArguments& arguments);

// Adds the three to the command line; the one that the user chose is put into `chosen`.
void add_model_commands(CLI::App& app, std::function<ExitCode()>& chosen);

// Opens what `path` means.
Checkpoint open_checkpoint(const std::string& path);

}  // namespace strata
