#!/usr/bin/env python3
"""Runs `trainer bench step` and pytorch_llama.py alternately and compares their medians.

Both train the same model (hidden 512, 8 layers, 8 heads, 4 kv heads, ffn 1408, vocabulary 8192,
sequence 512, batch 4) on random tokens with one thread. Both programs' rates for the model's own
matrix products are measured too, since a PyTorch whose products are slow is no yardstick: the
comparison is VOID where its rate is under 0.7 of ours. A precision in which PyTorch would take over
a minute a step is not run at all; its matrix products alone have then decided.

The last line is a JSON object with every figure.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PYTORCH = Path(__file__).resolve().parent / "pytorch_llama.py"
FAIR_GEMM_SHARE = 0.7
SLOWEST_STEP_SECONDS = 60.0
BUSY_SHARE = 0.9  # a run that got less of a core than this was disturbed


def json_line(command: list) -> dict:
    """The last line that `command` prints, read as JSON; its errors and progress go to our stderr."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}, {len(lines)} lines printed")
    try:
        return json.loads(lines[-1])
    except json.JSONDecodeError:
        sys.exit(f"{' '.join(map(str, command))}: its last line is not JSON: {lines[-1][:200]}")


def compare(precision: str, arguments) -> dict:
    ours = [arguments.trainer, "bench", "step", "--precision", precision, "--threads", 1,
            "--clock", arguments.clock]
    theirs = [sys.executable, PYTORCH, "--precision", precision, "--threads", 1, "--clock", arguments.clock]
    gemm = json_line([*theirs, "--gemm"])
    result = {"precision": precision, "torch": gemm["torch"], "clock": arguments.clock,
              "pytorch_gemm_gflops": gemm["gemm_gflops"]}
    # One thread computes nothing faster than its products alone.
    too_slow = gemm["gemm_seconds_per_step"] > SLOWEST_STEP_SECONDS
    way = None
    if not too_slow:
        way = json_line([*theirs, "--steps", 1, *(["--compile"] if arguments.compile else [])])["way"]
    our_runs, their_runs = [], []
    for _ in range(arguments.runs):
        our_runs.append(json_line(ours))
        if way:
            their_runs.append(json_line([*theirs, "--way", way]))
    result["our_tokens_per_second"] = statistics.median(run["tokens_per_second"] for run in our_runs)
    result["our_gemm_gflops"] = statistics.median(run["gemm_gflops"] for run in our_runs)
    result["our_gemm_share"] = statistics.median(run["gemm_share"] for run in our_runs)
    result["gemm_ratio"] = gemm["gemm_gflops"] / result["our_gemm_gflops"]
    result["void"] = result["gemm_ratio"] < FAIR_GEMM_SHARE
    result["pytorch_way"] = way
    result["pytorch_tokens_per_second"] = result["ratio"] = None
    if their_runs:
        result["pytorch_tokens_per_second"] = statistics.median(run["tokens_per_second"] for run in their_runs)
        result["ratio"] = result["our_tokens_per_second"] / result["pytorch_tokens_per_second"]
        result["cpu_share"] = min(run["cpu_share"] for run in our_runs + their_runs)
        result["disturbed"] = arguments.clock == "wall" and result["cpu_share"] < BUSY_SHARE
    result["our_runs"] = [run["tokens_per_second"] for run in our_runs]
    result["pytorch_runs"] = [run["tokens_per_second"] for run in their_runs]
    return result


def report(result: dict) -> None:
    print(f"\n{result['precision']}, one thread, torch {result['torch']}, {result['clock']} time")
    print(f"  matrix products alone   ours {result['our_gemm_gflops']:8.1f} GFLOP/s   "
          f"PyTorch {result['pytorch_gemm_gflops']:8.1f} GFLOP/s   ratio {result['gemm_ratio']:.2f}")
    print(f"  their share of our step {result['our_gemm_share']:.2f}")
    print(f"  ours    {result['our_tokens_per_second']:8.0f} tokens/s, median of "
          f"{', '.join(f'{rate:.0f}' for rate in result['our_runs'])}")
    if result["pytorch_way"]:
        print(f"  PyTorch {result['pytorch_tokens_per_second']:8.0f} tokens/s, median of "
              f"{', '.join(f'{rate:.0f}' for rate in result['pytorch_runs'])} ({result['pytorch_way']})")
        print(f"  ratio   {result['ratio']:8.2f}")
        if result["disturbed"]:
            print("  DISTURBED: a run had less than a whole core -> repeat on an idle machine, or with --clock cpu")
    else:
        print(f"  PyTorch not run: its matrix products alone take over {SLOWEST_STEP_SECONDS:.0f} s a step")
    if result["void"]:
        print(f"  VOID: PyTorch's matrix products run at {result['gemm_ratio']:.2f} of the rate of ours, "
              f"under {FAIR_GEMM_SHARE}: no fair comparison in {result['precision']} on this processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=Path, required=True, help="our program")
    parser.add_argument("--runs", type=int, default=3, help="alternate runs of each (default 3)")
    parser.add_argument("--precision", action="append", choices=("bf16", "fp32"), help="default: both")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: each process's time on a processor, on a machine that others use too")
    parser.add_argument("--compile", action="store_true", help="let PyTorch try torch.compile (minutes)")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs {arguments.runs}: at least 1")
    results = {p: compare(p, arguments) for p in dict.fromkeys(arguments.precision or ["bf16", "fp32"])}
    for result in results.values():
        report(result)
    speeds = [r["pytorch_tokens_per_second"] for r in results.values() if r["pytorch_tokens_per_second"]]
    if "bf16" in results and speeds:
        best = results["bf16"]["our_tokens_per_second"] / max(speeds)
        print(f"\nour bf16 against the fastest precision that PyTorch was run in: {best:.2f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
