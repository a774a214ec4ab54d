#include "commands/bench.h"

#include <memory>

namespace strata {

void add_bench_commands(CLI::App& app, std::function<ExitCode()>& chosen) {
  CLI::App* bench = app.add_subcommand("bench", "measure this machine");
  bench->require_subcommand(1);

  CLI::App* step = bench->add_subcommand(
      "step",
      "Times whole optimizer steps (forward, backward, clipping, AdamW) on random tokens in this process "
      "alone, whatever mesh the configuration names, and the step's own matrix products by themselves. "
      "Medians are printed; the last line is one JSON object: tokens_per_second; gemm_gflops, the rate of "
      "the products alone; gemm_share, their time over the step's; cpu_share, how much of its threads' cores "
      "the process had (under 0.9: disturbed); memory_mebibytes, planned by the dry run and resident after "
      "the "
      "warm-up; and more.");
  const auto a = std::make_shared<BenchStepArguments>();
  auto* config = step->add_option("--config", a->config, "configuration file (JSON); its data is not read");
  step->add_option("--preset", a->preset, "model preset (default bench-40m)")->excludes(config);
  step->add_option("--set", a->sets, "override a key: a.b.c=value; may be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  step->add_option("--precision", a->precision, "fp32, bf16 or bf16_pure (default: the file's, or bf16)");
  step->add_option("--threads", a->threads, "CPU threads (default: the file's, or 1)");
  step->add_option("--batch", a->batch, "sequences of a micro-step (default: the file's, or 4)");
  step->add_option("--sequence", a->sequence, "tokens of a sequence (default: the file's, or 512)");
  step->add_option("--steps", a->steps, "steps to measure (default 5)")->check(CLI::Range(1, 1000000));
  step->add_option("--warmup", a->warmup, "steps before them (default 2)")->check(CLI::Range(1, 1000000));
  step->add_option(
          "--clock", a->clock,
          "wall (default), or cpu: the process's time on a processor, for a comparison of one thread "
          "on a machine that others use too")
      ->check(CLI::IsMember({"wall", "cpu"}));
  step->callback([a, &chosen] { chosen = [a] { return bench_step_command(*a); }; });
}

}  // namespace strata
