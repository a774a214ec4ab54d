#!/usr/bin/env bash
# Our CPU training step against PyTorch's on the same model, one thread, in bf16 and fp32 (see compare.py).
# Needs Python's venv module, pip's access to PyPI and 6 GB of disk under build/bench-venv.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
usage="usage: scripts/bench/cpu_vs_pytorch.sh [--trainer PATH] [--runs N] [--precision bf16|fp32]... [--clock wall|cpu] [--compile]"
trainer="" passed=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) printf '%s\n\n' "$usage"; exec python3 "$ROOT/scripts/bench/compare.py" --help ;;
    --compile) passed+=("$1"); shift ;;
    --trainer | --runs | --precision | --clock)
      [ $# -ge 2 ] || die "$1 needs a value -> $usage"
      if [ "$1" = --trainer ]; then trainer=$2; else passed+=("$1" "$2"); fi
      shift 2 ;;
    *) die "unknown argument $1 -> $usage" ;;
  esac
done
mkdir -p "$ROOT/build"
if [ -z "$trainer" ]; then
  install_packages build
  say "build"
  build default
  trainer="$ROOT/build/default/src/trainer"
fi
[ -x "$trainer" ] || die "$trainer is not a program -> --trainer PATH names the built trainer"

venv="$ROOT/build/bench-venv" wanted="$ROOT/scripts/bench/requirements.txt"
if ! cmp -s "$venv/requirements.txt" "$wanted"; then
  say "PyTorch in build/bench-venv"
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
  cp "$wanted" "$venv/requirements.txt"
fi
say "benchmark"
exec "$venv/bin/python" "$ROOT/scripts/bench/compare.py" --trainer "$trainer" "${passed[@]}"
