"""Exposed aggregation time by schedule.

One mpiexec trains the same model with federation off, blocking, overlap and streaming in turns, several times over.
Of every run the second round of A steps is measured: it holds one aggregation of every unit, whenever the schedule does
it. A round's time is the sum over its A places of the median step at that place. Exposed is a schedule's round minus
the round with federation off.
"""

import argparse
import json
import pathlib
import statistics

import numpy as np

EVERY = 8
SCHEDULES = ("off", "blocking", "overlap", "streaming")


def config(folder: pathlib.Path, schedule: str, run: str) -> dict:
    federation = {"every": 10**6} if schedule == "off" else {"every": EVERY, "rule": "diloco", "schedule": schedule}
    if schedule == "streaming":
        federation |= {"fragment_layers": 1, "tau": 3}
    return {
        "model": {"preset": "llama-5m"},
        "data": {"train": str(folder / "tokens.bin"), "sequence_length": 512, "batch_size": 4},
        "mesh": {"federate": 2},
        "federation": federation,
        "precision": "bf16",
        "schedule": {"kind": "constant", "steps": 2 * EVERY + 1},  # the last step aggregates in any case
        "run_dir": str(folder / run),
    }


def write_tokens(path: pathlib.Path) -> None:
    ids = np.random.default_rng(1).integers(0, 8192, 200 * 512 + 1).astype(np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, ids.size
    path.write_bytes(header.tobytes() + ids.tobytes())


def prepare(folder: pathlib.Path, repeats: int) -> None:
    write_tokens(folder / "tokens.bin")
    cases = [config(folder, s, f"{s}.{i}") for i in range(repeats) for s in SCHEDULES]
    (folder / "cases.json").write_text(json.dumps(cases))


def rounds(folder: pathlib.Path, schedule: str) -> list[list[float]]:
    """Seconds of every step of the measured round, by repeat."""
    out = []
    for path in sorted(folder.glob(f"{schedule}.*/metrics.jsonl")):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        out.append([step["time"]["total"] for step in steps if EVERY < step["step"] <= 2 * EVERY])
    return out


def report(folder: pathlib.Path) -> None:
    time = {
        schedule: sum(statistics.median(place) for place in zip(*rounds(folder, schedule), strict=True))
        for schedule in SCHEDULES
    }
    blocking = time["blocking"] - time["off"]
    print(f"two groups of one rank, llama-5m, bf16, A = {EVERY}, diloco, fp32 on the wire")
    print("schedule   step, mean of a round  exposed in a step  of its step  of blocking's")
    for schedule in SCHEDULES:
        exposed = time[schedule] - time["off"]
        print(
            f"{schedule:9}  {1e3 * time[schedule] / EVERY:17.0f} ms  {1e3 * exposed / EVERY:14.1f} ms"
            f"  {100 * exposed / time[schedule]:10.1f}%  {100 * exposed / blocking:12.1f}%"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prepare", "report"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.what == "prepare":
        prepare(arguments.folder, arguments.repeats)
    else:
        report(arguments.folder)


if __name__ == "__main__":
    main()
