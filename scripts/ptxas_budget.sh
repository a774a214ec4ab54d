#!/usr/bin/env bash
# Makes tests/cuda/budget.csv and its table in docs/kernels.md anew, from what ptxas says of the kernels now and from the
# launches of the emulated tests. Read the difference before committing it: it is what the gate will hold kernels to.
# --check: instead, compares the launches that a run of the tests has logged (build/launches.txt) with the table.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
folder="$ROOT/build/default"
launches="$ROOT/build/launches.txt"
table="$ROOT/tests/cuda/budget.csv"
gate="$ROOT/tests/cuda/ptxas_gate.py"
reports() { find "$folder/cuda" -path '*strata_kernels_device/*.ptxas'; }

case "${1:-}" in
  "") ;;
  --check)
    mapfile -t found < <(reports)
    if [ ${#found[@]} -eq 0 ] || [ ! -f "$launches" ]; then
      echo "skipped: no nvcc or no CUDA headers here"
      exit 0
    fi
    exec python3 "$gate" check --table "$table" --launches "$launches" "${found[@]}"
    ;;
  *) die "unknown argument $1 -> scripts/ptxas_budget.sh [--check]" ;;
esac

"$ROOT/scripts/cuda_headers.sh"
cmake --preset default -S "$ROOT" >/dev/null
mapfile -t programs < <(ninja -C "$folder" -t targets all | grep -oE '^kernels_[a-z]+_plain' | sort -u)
cmake --build "$folder" --parallel "$CORES" --target strata_kernels_device "${programs[@]}"
rm -f "$launches"
for program in "${programs[@]}"; do
  STRATA_KERNEL_TESTS_ONE_SCHEDULE=1 STRATA_EMULATION_LAUNCH_LOG="$launches" "$folder/tests/kernels/$program" >/dev/null ||
    die "$program fails -> mend the kernels first"
done
mapfile -t found < <(reports)
python3 "$gate" update --table "$table" --launches "$launches" "${found[@]}"
python3 "$gate" check --table "$table" --launches "$launches" "${found[@]}"
python3 "$gate" markdown --table "$table" --write "$ROOT/docs/kernels.md"
git -C "$ROOT" diff --stat -- tests/cuda/budget.csv docs/kernels.md
