#pragma once
// `trainer bench ...`: what this machine does with this program.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace strata {

struct BenchStepArguments {
  std::string config;                // file; empty: a model preset
  std::string preset = "bench-40m";  // ignored when a file is given
  std::vector<std::string> sets;     // "a.b.c=value"
  // Override the file; with a preset the defaults are 4 sequences of 512 tokens, bf16, one thread.
  std::optional<std::int64_t> batch, sequence;
  std::optional<std::string> precision;
  std::optional<int> threads;
  int steps = 5, warmup = 2;   // measured steps, and steps before them
  std::string clock = "wall";  // wall | cpu: time of the process on processors, for one thread only
};

// Times whole optimizer steps on random tokens, in this process alone, and the step's matrix products by
// themselves. The last line it prints is one JSON object.
ExitCode bench_step_command(const BenchStepArguments& arguments);

// Adds `bench` with its subcommands to the command line; the one that the user chose is put into `chosen`.
void add_bench_commands(CLI::App& app, std::function<ExitCode()>& chosen);

}  // namespace strata
