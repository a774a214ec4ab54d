// trainer: command line -> one command. Exit codes are those of base/error.h.
#include <CLI/CLI.hpp>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>

#include "base/log.h"
#include "commands/bench.h"
#include "commands/commands.h"
#include "commands/model.h"
#include "commands/ranks.h"

namespace {

using strata::ExitCode;

ExitCode run(CLI::App& app, const CLI::App& reference, const strata::RunArguments& arguments, bool dry_run,
             int ranks) {
  if (reference.parsed()) return strata::config_reference_command();
  if (arguments.config.empty()) {
    return strata::refuse_on_ranks(
        strata::UsageError("no --config was given -> " + app.get_name() + " --config FILE, or --help"));
  }
  if (dry_run) return strata::dry_run_command(arguments, ranks);
  if (ranks > 0) {
    return strata::refuse_on_ranks(
        strata::UsageError("--ranks is only for --dry-run -> start that many ranks with mpiexec or srun"));
  }
  return strata::train_command(arguments);
}

// What CLI11 has to say: help on stdout, or a refusal.
ExitCode answer(const CLI::App& app, const CLI::ParseError& e) {
  std::ostringstream help, refusal;
  if (app.exit(e, help, refusal) == 0) {
    std::cout << help.str();
    return ExitCode::done;
  }
  std::string text = refusal.str();
  text.erase(text.find_last_not_of('\n') + 1);
  return strata::refuse_on_ranks(strata::UsageError(text));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"trainer: pre-trains Llama-class decoders", "trainer"};
  strata::RunArguments arguments;
  bool dry_run = false;
  int ranks = 0;
  app.add_option("--config", arguments.config, "configuration file (JSON)");
  app.add_option("--set", arguments.sets, "override a key: a.b.c=value; may be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option(
      "--resume", arguments.resume,
      "continue a run: auto (the newest checkpoint in run_dir, if any), a checkpoint's folder, or a "
      "run's for its newest one");
  app.add_flag("--dry-run", dry_run, "print configuration, mesh, memory and bytes to move, then stop");
  app.add_option("--ranks", ranks,
                 "with --dry-run: the ranks there are; refuse a mesh that does not fill them")
      ->check(CLI::Range(1, 1 << 30));
  const CLI::App* reference =
      app.add_subcommand("config-reference", "print all configuration keys as Markdown");
  std::function<ExitCode()> chosen;  // by subcommands that bring their own options
  std::string inspected;
  bool verify = false;
  CLI::App* inspect = app.add_subcommand("inspect", "print what a checkpoint holds, or how a run stands");
  inspect->add_option("path", inspected, "a checkpoint's folder or a run's")->required();
  inspect->add_flag("--verify", verify, "compare every byte of the checkpoint with its checksums");
  inspect->callback([&] { chosen = [&] { return strata::inspect_command(inspected, verify); }; });
  strata::add_bench_commands(app, chosen);
  strata::add_model_commands(app, chosen);
  try {
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      return static_cast<int>(answer(app, e));
    }
    return static_cast<int>(chosen ? chosen() : run(app, *reference, arguments, dry_run, ranks));
  } catch (const strata::Error& e) {
    strata::log_error("{}", e.what());
    return static_cast<int>(e.code());
  } catch (const std::exception& e) {
    strata::log_error("{}", e.what());
    return static_cast<int>(ExitCode::failure);
  }
}
