"""Trains the benchmark model on several meshes in turns and prints the medians of their steps.

Model bench-40m, bf16, batch 4 a rank, sequence 512, one thread a rank. The first step of a run, which warms caches up,
does not count.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

import numpy as np

STEPS = 4
PHASES = ("forward", "backward", "optimizer", "aggregation", "total")


def write_tokens(path: pathlib.Path) -> None:
    ids = np.random.default_rng(1).integers(0, 8192, 200 * 512 + 1).astype(np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, ids.size
    path.write_bytes(header.tobytes() + ids.tobytes())


def train(trainer: str, folder: pathlib.Path, mesh: str, run: str) -> list[dict]:
    federate, replicate, shard = (int(size) for size in mesh.split("x"))
    config = {
        "model": {"preset": "bench-40m"},
        "data": {"train": str(folder / "tokens.bin"), "sequence_length": 512, "batch_size": 4},
        "mesh": {"federate": federate, "replicate": replicate, "shard": shard},
        "precision": "bf16",
        "threads": 1,
        "schedule": {"kind": "constant", "steps": STEPS},
        "run_dir": str(folder / run),
    }
    path = folder / f"{run}.json"
    path.write_text(json.dumps(config))
    ranks = federate * replicate * shard
    command = ["mpiexec", "-n", str(ranks), trainer, "--config", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{mesh}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "train" and line["step"] > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("meshes", nargs="+", metavar="FxRxS")
    arguments = parser.parse_args()
    steps: dict[str, list[dict]] = {mesh: [] for mesh in arguments.meshes}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_tokens(folder / "tokens.bin")
        for repeat in range(arguments.repeats):
            for mesh in arguments.meshes:
                steps[mesh] += train(arguments.trainer, folder, mesh, f"{mesh}.{repeat}")
    first = None
    print(f"bench-40m, bf16, batch 4 a rank, sequence 512, {len(os.sched_getaffinity(0))} cores, medians in ms")
    print("mesh FxRxS  " + "".join(f"{phase:>12}" for phase in PHASES) + "    tokens/s  of the first")
    for mesh, lines in steps.items():
        speed = statistics.median(line["tokens_per_second"] for line in lines)
        first = first or speed
        times = [1e3 * statistics.median(line["time"][phase] for line in lines) for phase in PHASES]
        print(f"{mesh:12}" + "".join(f"{time:12.0f}" for time in times) + f"{speed:12.0f}  {speed / first:12.2f}")


if __name__ == "__main__":
    main()
