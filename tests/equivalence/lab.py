"""Trains lists of configurations under mpiexec and reads what mesh_probe wrote down.

A case is a name and a whole configuration. All cases of one world size run in one mpiexec.
"""

import atexit
import copy
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any, NamedTuple

import numpy as np

Config = dict[str, Any]

# Hidden, feed-forward and vocabulary sizes that no group size here divides once they are multiplied.
MODEL: Config = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 997,
    "tie_word_embeddings": False,
}
SEQUENCE = 8
IGNORED = 3  # a token whose targets are masked, so that ranks hold different numbers of target tokens


class Mesh(NamedTuple):
    federate: int
    replicate: int
    shard: int

    @property
    def size(self) -> int:
        return self.federate * self.replicate * self.shard

    def __str__(self) -> str:
        return f"{self.federate}x{self.replicate}x{self.shard}"


def meshes(size: int, federate: int | None = None) -> list[Mesh]:
    """All meshes of `size` ranks, or those with that many federation groups."""
    return [
        Mesh(f, r, size // f // r)
        for f in ([federate] if federate else range(1, size + 1))
        for r in range(1, size + 1)
        if size % (f * r) == 0
    ]


def unit_sizes(model: Config) -> dict[str, int]:
    """Elements of every unit, from the architecture alone."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head = model.get("head_dim", hidden // heads)
    q, kv, ff = heads * head, model["num_key_value_heads"] * head, model["intermediate_size"]
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * ff + 2 * hidden
    matrix = model["vocab_size"] * hidden
    layers = {f"decoder.{i}": layer for i in range(model["num_hidden_layers"])}
    if model["tie_word_embeddings"]:
        return {"root": matrix + hidden} | layers
    return {"embedding": matrix} | layers | {"head": matrix + hidden}


class Lab:
    """A folder with training data in which cases run; it goes when the tests end well."""

    def __init__(self, name: str) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"strata_{name}_"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self.data = self.folder / "tokens.bin"
        write_tokens(self.data, sequences=700)
        self.cases: dict[str, Config] = {}

    def case(self, name: str, mesh: Mesh, **overrides: Any) -> str:
        """Adds a case; keys are written a__b for a.b. Returns its name."""
        config: Config = {
            "model": copy.deepcopy(MODEL),
            "data": {"train": str(self.data), "sequence_length": SEQUENCE, "batch_size": 2, "ignore_token": IGNORED},
            "mesh": mesh._asdict(),
            "federation": {},
            "precision": "fp32",
            "optimizer": {"lr": 3e-4},
            "schedule": {"kind": "constant", "steps": 8},
            "timeout_seconds": 120,
            "run_dir": str(self.folder / name),
        }
        for key, value in overrides.items():  # None leaves a key at its default
            *path, last = key.split("__")
            at = config
            for part in path:
                at = at.setdefault(part, {})
            at[last] = value
        assert name not in self.cases, name
        self.cases[name] = config
        return name

    def run(self) -> None:
        """Trains all cases."""
        worlds: dict[int, list[Config]] = {}
        for config in self.cases.values():
            worlds.setdefault(Mesh(**config["mesh"]).size, []).append(config)
        for size, configs in sorted(worlds.items()):
            listing = self.folder / f"cases.{size}.json"
            listing.write_text(json.dumps(configs))
            command = [os.environ["MPIEXEC"], "-n", str(size), os.environ["MESH_PROBE"], str(listing)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{size} ranks: exit code {done.returncode}\n{done.stdout[-4000:]}")

    def result(self, name: str) -> "Result":
        return Result(self.cases[name])


class Result:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.mesh = Mesh(**config["mesh"])
        self.folder = pathlib.Path(config["run_dir"])
        self.metrics = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        assert len(self.metrics) == config["schedule"]["steps"]

    def series(self, key: str) -> np.ndarray:
        return np.array([line[key] for line in self.metrics])

    def gradients(self) -> dict[str, np.ndarray]:
        """Step 1, by unit."""
        sizes = unit_sizes(self.config["model"])
        flat = np.fromfile(self.folder / "gradients.f32", np.float32)
        assert flat.size == sum(sizes.values())
        return dict(zip(sizes, np.split(flat, np.cumsum(list(sizes.values()))[:-1]), strict=True))

    def parameters(self, group: int = 0, replica: int = 0) -> np.ndarray:
        flat = np.fromfile(self.folder / f"parameters.{group}.{replica}.f32", np.float32)
        assert flat.size == sum(unit_sizes(self.config["model"]).values())
        return flat

    def all_parameters(self) -> list[np.ndarray]:
        return [self.parameters(f, r) for f in range(self.mesh.federate) for r in range(self.mesh.replicate)]

    def bytes(self, rank: int) -> Config:
        return json.loads((self.folder / f"bytes.{rank}.json").read_text())


def write_tokens(path: pathlib.Path, sequences: int) -> None:
    """An llm.c shard. Every sequence has its own share of ignored targets, from none to nearly all."""
    generator = np.random.default_rng(7)
    shares = generator.uniform(0, 0.9, sequences).repeat(SEQUENCE)
    # Squares make small ids frequent, so that there is something to learn.
    ids = (generator.uniform(0, 1, shares.size) ** 2 * MODEL["vocab_size"]).astype(np.uint16)
    ids[generator.uniform(0, 1, shares.size) < shares] = IGNORED
    ids = np.append(ids, np.uint16(1))
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, ids.size
    path.write_bytes(header.tobytes() + ids.tobytes())


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the difference over the norm of b."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
