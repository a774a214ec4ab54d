#!/usr/bin/env bash
# Builds the fuzz targets with clang in build/fuzz and runs each for SECONDS (default 60) from its seed corpus.
# What it finds stays in build/fuzz/findings; then the exit status is not 0.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "SECONDS is $seconds -> scripts/fuzz.sh [SECONDS]"
command -v clang++ >/dev/null || die "clang++ is not here -> apt-get install clang libclang-rt-14-dev"
build="$ROOT/build/fuzz"
cmake -S "$ROOT" -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DSTRATA_FUZZ=ON -DSTRATA_CUDA=OFF -DSTRATA_SANITIZE=fuzzer-no-link,address,undefined \
  -DCMAKE_CXX_FLAGS=-fno-sanitize-recover=undefined >"$build.log" 2>&1 || { cat "$build.log"; die "cmake failed"; }
cmake --build "$build" --target fuzz_config fuzz_index fuzz_llmc
mkdir -p "$build/findings"
failed=()
for target in config index llmc; do
  say "fuzzing $target for $seconds s"
  mkdir -p "$build/corpus/$target"
  # The corpus grows in the build folder; the seeds in the tree are only read.
  if ! "$build/tests/fuzz/fuzz_$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=8192 \
    -print_final_stats=1 -verbosity=0 -artifact_prefix="$build/findings/$target-" \
    "$build/corpus/$target" "$ROOT/tests/fuzz/corpus/$target" >"$build/$target.log" 2>&1; then
    failed+=("$target")
    tail -n 40 "$build/$target.log"
  fi
  grep -E "number_of_executed_units|average_exec_per_sec" "$build/$target.log" || true
done
[ ${#failed[@]} = 0 ] || die "findings in ${failed[*]} -> see $build/findings"
