#!/usr/bin/env bash
# line.sh TRAINER, in the repository's root: exit codes and messages of the command line.
set -uo pipefail
trainer=$1
failures=0
# expect CODE PATTERN ARGUMENTS...: the exit code and a pattern of stdout and stderr together.
expect() {
  local code=$1 pattern=$2 output rc
  shift 2
  output=$("$trainer" "$@" 2>&1)
  rc=$?
  if [ "$rc" != "$code" ] || ! grep -qE -- "$pattern" <<<"$output"; then
    echo "FAILED: trainer $*: exit code $rc, expected $code and /$pattern/ in:"
    echo "$output"
    failures=$((failures + 1))
  fi
}
small=configs/small/fl_hsdp.json
expect 0 'config-reference' --help
expect 0 '`optimizer.lr`' config-reference
expect 0 '"lr": 0.001' --config $small --dry-run
expect 0 '"lr": 0.5' --config $small --dry-run --set optimizer.lr=0.5 --set seed=7
expect 0 '"seed": 7' --config $small --dry-run --set optimizer.lr=0.5 --set seed=7
expect 0 'ranks needed +2 x 2 x 2 = 8' --config $small --dry-run --ranks 8
expect 2 '8 ranks, but 7' --config $small --dry-run --ranks 7
expect 2 '--config' --dry-run
expect 2 'dry-run' --config $small --ranks 8
expect 2 'did you mean "optimizer.lr"' --config $small --dry-run --set optimizer.rl=1
expect 2 'no/such.json' --config no/such.json
expect 2 'unknown|not expected' --config $small --dri-run
expect 2 'Value|ranks' --config $small --dry-run --ranks 0
expect 0 '16 x 8 x 4 = 512' --config configs/paper/fl_hsdp.json --dry-run --ranks 512
expect 0 '"gemm_share":' bench step --preset llama-5m --precision fp32 --batch 1 --sequence 16 --steps 1 --warmup 1
expect 2 'no/such.json' bench step --config no/such.json
expect 2 'bench-40m' bench step --preset llama-0m
expect 2 'precision' bench step --precision fp8
expect 2 'threads' bench step --clock cpu --threads 2
expect 2 'steps|range' bench step --steps 0
exit $((failures > 0))
