#!/usr/bin/env python3
"""Says what a quickstart run did and where everything is; the last line compares its perplexity.

    quickstart_summary.py RUN BASELINE [--check]

BASELINE is the JSON of ngram_baseline.py on the same shards. --check: exit status 1 unless the validation perplexity
is far enough below both baselines that only a model which attends to its context gets there.
"""

import argparse
import json
import pathlib
import sys

# The validation perplexity must be this many times below.
BARS = {"unigram": 16.0, "bigram": 1.5}


def read_records(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("baseline", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    run = arguments.run

    config = json.loads((run / "config.resolved.json").read_text())
    baseline = json.loads(arguments.baseline.read_text())
    records = read_records(run / "metrics.jsonl")
    train = [record for record in records if record["split"] == "train"]
    last = [record for record in records if record["split"] == "validation"][-1]
    if last["step"] != config["schedule"]["steps"]:
        print(f"error: {run}: the last evaluation is of step {last['step']} -> see {run}/log.txt", file=sys.stderr)
        return 1

    mesh = config["mesh"]
    seconds = sum(record["time"]["total"] for record in train)
    tokens = train[-1]["tokens"]
    print(
        f"text       {baseline['train_tokens']:,} tokens to train on, {baseline['validation_tokens']:,} to validate on,"
        f" vocabulary {baseline['vocab_size']:,}"
    )
    print(
        f"mesh       {mesh['federate']} federation groups x {mesh['replicate']} replicas x {mesh['shard']} shards,"
        f" aggregation every {config['federation']['every']} steps, {config['precision']}"
    )
    print(
        f"training   {len(train):,} steps, {tokens:,} tokens ({tokens / baseline['train_tokens']:.2f} epochs) in"
        f" {seconds:.0f} s: {tokens / seconds:,.0f} tokens/s"
    )
    print(f"metrics    {run}/metrics.jsonl, a line a step; log.txt and config.resolved.json beside it")
    print(f"plot       {run}/perplexity.png")
    print(f"checkpoint {run}/checkpoints" if (run / "checkpoints").is_dir() else "checkpoint none")

    perplexity = last["perplexity"]
    failed = False
    for name, times in BARS.items():
        ratio = baseline[f"{name}_perplexity"] / perplexity
        met = ratio >= times
        failed |= not met
        print(f"{name:10} perplexity is {ratio:.2f} times the model's (bar {times:g}: {'met' if met else 'MISSED'})")
    print(
        f"validation perplexity {perplexity:.1f}, bigram perplexity {baseline['bigram_perplexity']:.1f},"
        f" unigram perplexity {baseline['unigram_perplexity']:.1f}, run folder {run}"
    )
    return 1 if failed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
