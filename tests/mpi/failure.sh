#!/usr/bin/env bash
# failure.sh MODE MPIEXEC PROGRAM: runs PROGRAM on ranks as MODE asks and checks exit code, output and that no rank
# is left.
set -u
mode=$1 mpiexec=$2 program=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
out=$folder/out

fail() { echo "FAILED: $*"; cat "$out"; exit 1; }

run() {  # ranks
  timeout 40 "$mpiexec" -n "$1" "$program" "$mode" >"$out" 2>&1
  code=$?
}
expect_code() { [ "$code" = "$1" ] || fail "exit code $code, expected $1"; }
expect_line() { grep -Eq -- "$1" "$out" || fail "no line matches: $1"; }
expect_nobody() {
  for _ in $(seq 50); do
    local left=0 pid
    for pid in $(sed -n 's/.*pid \([0-9]*\)$/\1/p' "$out"); do
      [ -d "/proc/$pid" ] && ! grep -q '^State:[[:space:]]*Z' "/proc/$pid/status" 2>/dev/null && left=1
    done
    [ "$left" = 0 ] && return
    sleep 0.1
  done
  fail "ranks are left"
}

case $mode in
  absent_collective)
    run 4
    expect_code 4
    expect_line 'step 12, unit decoder\.3: all-reduce in group federate \(ranks 0 1 2 3\): nothing for 2 s; rank\(s\) 2 did not arrive'
    expect_nobody ;;
  absent_barrier)
    run 3
    expect_code 4
    expect_line 'step 40, unit checkpoint: barrier in group world \(ranks 0 1 2\): .*rank\(s\) 2 did not arrive'
    expect_nobody ;;
  group_mismatch)
    run 3
    expect_code 2
    expect_line 'rank . makes group shard \[.*same configuration'
    expect_nobody ;;
  error_exit)
    run 3
    expect_code 3
    expect_line 'shard 7 is truncated'
    expect_nobody ;;
  killed)
    "$mpiexec" -n 4 "$program" "$mode" >"$out" 2>&1 &
    launcher=$!
    for _ in $(seq 200); do
      [ "$(grep -c 'pid [0-9]*$' "$out")" = 4 ] && break
      sleep 0.05
    done
    sleep 0.3
    victim=$(sed -n 's/.*pid \([0-9]*\)$/\1/p' "$out" | sed -n 3p)
    [ -n "$victim" ] || fail "ranks did not start"
    kill -KILL "$victim"
    wait "$launcher"
    code=$?
    [ "$code" != 0 ] || fail "the job ended with code 0"
    expect_nobody ;;
  singleton)
    env -u PMI_RANK -u PMI_FD -u PMI_SIZE "$program" "$mode" >"$out" 2>&1
    code=$?
    expect_code 0
    expect_line 'reached the end with 1 rank'
    env SLURM_STEP_NUM_TASKS=4 "$program" "$mode" >"$out" 2>&1
    code=$?
    expect_code 2
    expect_line 'srun --mpi=pmi2' ;;
  *) fail "unknown mode" ;;
esac
echo "ok: $mode"
