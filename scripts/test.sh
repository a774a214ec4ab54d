#!/usr/bin/env bash
# Builds and runs the tests. --fast: the subset that takes under four minutes.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
fast=0
for argument in "$@"; do
  case "$argument" in
    --fast) fast=1 ;;
    -h | --help) echo "usage: scripts/test.sh [--fast]"; exit 0 ;;
    *) die "unknown argument $argument -> scripts/test.sh [--fast]" ;;
  esac
done
mkdir -p "$ROOT/build"
started=$SECONDS
failed=()
# stage NAME command...: runs a stage, remembers whether it failed, says how long it took.
stage() {
  local name=$1 began=$SECONDS
  shift
  say "$name"
  "$@" || failed+=("$name")
  echo "-- $name: $((SECONDS - began)) s"
}

install_packages test
python_environment
"$ROOT/scripts/cuda_headers.sh"
say "build"
build default
export PYTHON
run_ctest() { (cd "$ROOT" && ctest --preset default --parallel "$1" "${@:2}"); }
# Emulated kernel tests log what they launch.
export STRATA_EMULATION_LAUNCH_LOG="$ROOT/build/launches.txt"
rm -f "$STRATA_EMULATION_LAUNCH_LOG"

stage "formatting" "$ROOT/scripts/format.sh" --check
if [ $fast = 1 ]; then
  stage "unit tests" run_ctest "$CORES" -LE "slow|mpi|serial"
  stage "tests on several ranks" run_ctest 1 -L "mpi|serial" -LE slow
else
  stage "unit tests" run_ctest "$CORES" -LE "mpi|serial"
  stage "tests on several ranks" run_ctest 1 -L "mpi|serial"
  stage "every kernel is launched as its budget says" "$ROOT/scripts/ptxas_budget.sh" --check
  stage "planted faults, a sample" python3 "$ROOT/tests/cuda/mutate.py" --sample --builds plain
  stage "fuzzing" "$ROOT/scripts/fuzz.sh" 60
fi
stage "data tools" "$ROOT/tests/data_tools/run.sh"

echo
echo "all stages: $((SECONDS - started)) s"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all tests passed"
