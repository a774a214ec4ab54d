"""What the tests share: the tools' folder on the path, a small corpus, a tokenizer, and ways to run a tool."""

import json
import pathlib
import random
import struct
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "data_tools"
sys.path.insert(0, str(TOOLS))

WORDS = (
    "il mare calmo della sera portava una luce d'oro sulle case perché nessuno aveva chiuso le finestre "
    "città è più così può 12 1984 3,14 naïve Straße 東京 данные 👩‍🚀 e\u0301 "
    "co-operate it's WE'LL x=y+1; \t «virgolette»"
).split(" ")


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Distinct texts without blank lines inside, of very different lengths, some with line breaks."""
    rng = random.Random(seed)
    documents = []
    for number in range(count):
        words = [rng.choice(WORDS) for _ in range(rng.choice((1, 3, 20, 200)))]
        if len(words) > 10:
            words.insert(len(words) // 2, "\n")
        documents.append(f"{number} " + " ".join(words).strip() + rng.choice((".", "", "!")))
    return documents


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(300)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory, documents) -> pathlib.Path:
    import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer.train(iter(documents), 400).save(str(path))
    return path


def write_jsonl(path: pathlib.Path, documents: list[str]) -> pathlib.Path:
    path.write_bytes(b"".join(json.dumps({"url": "x", "text": text}).encode() + b"\n" for text in documents))
    return path


def run_tool(name: str, *arguments, timeout: float = 120) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOLS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


class Shard(NamedTuple):
    documents: list[list[int]]
    type_code: int


def read_megatron(prefix: pathlib.Path) -> Shard:
    """A reading of the format of its own, byte by byte from the format's description."""
    idx = prefix.with_name(prefix.name + ".idx").read_bytes()
    tokens = prefix.with_name(prefix.name + ".bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, index_length = struct.unpack_from("<QBQQ", idx, 9)
    assert version == 1
    lengths = struct.unpack_from(f"<{sequences}i", idx, 34)
    offsets = struct.unpack_from(f"<{sequences}q", idx, 34 + 4 * sequences)
    index = struct.unpack_from(f"<{index_length}q", idx, 34 + 12 * sequences)
    assert len(idx) == 34 + 12 * sequences + 8 * index_length
    assert index == tuple(range(sequences + 1))
    dtype = {8: "<u2", 4: "<i4"}[code]
    documents = [np.frombuffer(tokens, dtype, n, offset).tolist() for n, offset in zip(lengths, offsets)]
    assert sum(lengths) * np.dtype(dtype).itemsize == len(tokens)
    return Shard(documents, code)
