#include "commands/model.h"

#include <fmt/format.h>

#include <memory>

#include "checkpoint/folder.h"

namespace strata {
namespace {

// CLI::PositiveNumber would name the largest double as the end of its range.
const CLI::Range at_least_one(std::int64_t{1}, std::int64_t{1} << 40);

void add_checkpoint_choice(CLI::App& command, CheckpointArguments& arguments) {
  command.add_option("--group", arguments.choice.group,
                     "of a checkpoint between aggregations: the federation group whose model to take");
  command.add_flag("--average", arguments.choice.average, "the same: the mean over the groups");
}

void add_export(CLI::App& app, std::function<ExitCode()>& chosen) {
  const auto a = std::make_shared<ExportArguments>();
  CLI::App* command = app.add_subcommand("export", "write a checkpoint's model as a Hugging Face folder");
  command
      ->add_option("checkpoint", a->checkpoint.path, "a checkpoint's folder, or a run's for its newest one")
      ->required();
  command->add_option("--out", a->out, "the folder to make")->required();
  command->add_option("--dtype", a->dtype, "fp32 or bf16; default: as it is stored")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  add_checkpoint_choice(*command, a->checkpoint);
  command->add_option("--tokenizer", a->tokenizer, "tokenizer files to copy, or folders that hold them");
  command->add_option("--max-shard-size", a->largest_file, "of a weight file, as 5GB or 200MB; default 5GB")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::PositiveNumber);
  command->callback([a, &chosen] { chosen = [a] { return export_command(*a); }; });
}

void add_import(CLI::App& app, std::function<ExitCode()>& chosen) {
  const auto a = std::make_shared<ImportArguments>();
  CLI::App* command = app.add_subcommand(
      "import", "make a run folder that training continues from a Hugging Face folder's weights");
  command->add_option("folder", a->folder, "config.json and safetensors")->required();
  command
      ->add_option("--config", a->config, "configuration file (JSON); its model is replaced by the folder's")
      ->required();
  command->add_option("--set", a->sets, "override a key: a.b.c=value; may be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->callback([a, &chosen] { chosen = [a] { return import_command(*a); }; });
}

void add_evaluate(CLI::App& app, std::function<ExitCode()>& chosen) {
  const auto a = std::make_shared<EvaluateArguments>();
  CLI::App* command = app.add_subcommand("evaluate", "loss and perplexity of a model on token shards");
  CLI::Option* checkpoint = command->add_option("--checkpoint", a->checkpoint.path,
                                                "a checkpoint's folder, or a run's for its newest one");
  command->add_option("--hf", a->hf, "a Hugging Face folder")->excludes(checkpoint);
  command->add_option("--data", a->data, "shard files, prefixes or folders")->required();
  add_checkpoint_choice(*command, a->checkpoint);
  command->add_option("--sequence-length", a->sequence_length, "tokens of a sequence")->check(at_least_one);
  command->add_option("--batch-size", a->batch_size, "sequences at a time")->check(at_least_one);
  command->add_option("--sequences", a->sequences, "how many sequences, from the start; default all")
      ->check(at_least_one);
  command->add_option("--ignore-token", a->ignore_token, "targets equal to this id do not count");
  command->add_option("--precision", a->precision, "fp32 or bf16")->check(CLI::IsMember({"fp32", "bf16"}));
  command->add_option("--threads", a->threads, "CPU threads a rank")->check(CLI::Range(1, 1024));
  command->callback([a, &chosen] { chosen = [a] { return evaluate_command(*a); }; });
}

}  // namespace

void add_model_commands(CLI::App& app, std::function<ExitCode()>& chosen) {
  add_export(app, chosen);
  add_import(app, chosen);
  add_evaluate(app, chosen);
}

Checkpoint open_checkpoint(const std::string& path) {
  const auto checkpoints = list_checkpoints(std::filesystem::path(path) / "checkpoints");
  if (!checkpoints.empty()) return Checkpoint(checkpoints.back().path);
  return Checkpoint(path);
}

}  // namespace strata
