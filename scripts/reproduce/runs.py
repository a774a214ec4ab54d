"""Trainings that an experiment consists of: each is run once, under mpiexec, and its metrics are read back."""

import json
import pathlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mesh:
    name: str
    federate: int
    replicate: int
    shard: int

    @property
    def ranks(self) -> int:
        return self.federate * self.replicate * self.shard

    def __str__(self) -> str:
        return f"{self.federate}x{self.replicate}x{self.shard}"


@dataclass(frozen=True)
class Metrics:
    """Of one run: arrays over steps, and arrays over its evaluations."""

    loss: np.ndarray
    perplexity_rank_mean: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    evaluation_step: np.ndarray
    evaluation_loss: np.ndarray
    evaluation_seconds: np.ndarray


def read(folder: pathlib.Path) -> Metrics | None:
    """None while the run has not written its last step's evaluation."""
    try:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = json.loads((folder / "config.resolved.json").read_text())["schedule"]["steps"]
    except (OSError, ValueError):
        return None
    train = [r for r in records if r["split"] == "train"]
    validation = [r for r in records if r["split"] == "validation"]
    if len(train) != steps or not validation or validation[-1]["step"] != steps:
        return None
    return Metrics(
        np.array([r["loss"] for r in train]),
        np.array([r["perplexity_rank_mean"] for r in train]),
        np.array([r["time"]["total"] for r in train]),
        np.array([r["tokens"] for r in train]),
        np.array([r["step"] for r in validation]),
        np.array([r["loss"] for r in validation]),
        np.array([r["seconds"] for r in validation]),
    )


def run(trainer: pathlib.Path, folder: pathlib.Path, ranks: int, config: dict) -> Metrics:
    """Trains `config` into `folder` on `ranks` ranks. A finished run of the same config is not repeated."""
    wanted = folder.with_suffix(".json")
    text = json.dumps(config | {"run_dir": str(folder)}, indent=2) + "\n"
    if wanted.exists() and wanted.read_text() == text and (done := read(folder)):
        print(f"{folder.name}: already done", flush=True)
        return done
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    wanted.write_text(text)
    began = time.monotonic()
    result = subprocess.run(
        ["mpiexec", "-n", str(ranks), str(trainer), "--config", str(wanted)], capture_output=True, text=True
    )
    metrics = read(folder) if result.returncode == 0 else None
    if metrics is None:
        sys.exit(f"{folder.name} failed with code {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    print(f"{folder.name}: {time.monotonic() - began:.0f} s", flush=True)
    return metrics
