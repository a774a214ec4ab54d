"""Drives the trainer from outside: makes tiny token shards and configurations, starts one process or many ranks,
reads what they leave. Standard library only. TRAINER and MPIEXEC name the programs."""
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import tempfile
import time
import unittest

TRAINER = os.environ["TRAINER"]
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")
DEADLINE = 120  # seconds for what takes a second on an idle machine

VOCABULARY = 97
MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCABULARY, "tie_word_embeddings": True}


def write_shard(prefix, ids):
    """A Megatron pair of one document, uint16."""
    pathlib.Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    pathlib.Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", len(ids), 0, 0, 1))


def learnable_ids(count, seed):
    """Each id follows from the one before it three times in four: a model can learn something."""
    rng = random.Random(seed)
    ids = [0]
    while len(ids) < count:
        ids.append((5 * ids[-1] + 1) % VOCABULARY if rng.random() < 0.75 else rng.randrange(VOCABULARY))
    return ids


class Result:
    def __init__(self, code, output):
        self.code, self.output = code, output


class Case(unittest.TestCase):
    """A test with a folder of its own, two shards and a configuration in it."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="strata_command_"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        write_shard(self.folder / "train", learnable_ids(4097, 1))
        write_shard(self.folder / "validation", learnable_ids(513, 2))

    def config(self, **changes):
        """Writes a configuration and returns its path. Sections of `changes` are merged key by key."""
        config = {"model": dict(MODEL), "precision": "fp32", "run_dir": str(self.folder / "run"),
                  "data": {"train": str(self.folder / "train"), "sequence_length": 16, "batch_size": 2},
                  "optimizer": {"lr": 0.01}, "schedule": {"steps": 6}}
        for key, value in changes.items():
            if isinstance(value, dict):
                config.setdefault(key, {}).update(value)
            else:
                config[key] = value
        path = self.folder / "config.json"
        path.write_text(json.dumps(config))
        return str(path)

    def validation(self):
        return {"validation": str(self.folder / "validation")}

    def start(self, *arguments, ranks=1):
        command = [TRAINER, *arguments] if ranks == 1 else [MPIEXEC, "-n", str(ranks), TRAINER, *arguments]
        return self.start_command(command)

    def start_command(self, command, **options):
        output = open(self.folder / "output", "wb")
        self.addCleanup(output.close)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   **options)
        self.addCleanup(self.end, process)
        return process

    def end(self, process):
        """A failed test leaves nobody behind."""
        if process.poll() is None:
            for pid in ranks_of(process):
                os.kill(pid, 9)
            process.kill()
            process.wait()

    def finish(self, process):
        try:
            code = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.fail(f"still running after {DEADLINE} s:\n{self.output()}")
        return Result(code, self.output())

    def output(self):
        return (self.folder / "output").read_text(errors="replace")

    def trainer(self, *arguments, ranks=1):
        return self.finish(self.start(*arguments, ranks=ranks))

    def expect(self, result, code, *pieces):
        self.assertEqual(result.code, code, result.output)
        for piece in pieces:
            self.assertIn(piece, result.output)

    def metrics(self, run="run"):
        """Lines of metrics.jsonl as objects; strict JSON, so a bare NaN or Infinity fails here."""
        def refuse(constant):
            raise AssertionError(f"{constant} in metrics.jsonl is no JSON")
        text = (self.folder / run / "metrics.jsonl").read_text()
        self.assertTrue(text == "" or text.endswith("\n"), "the last line is torn")
        return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]

    def train_lines(self, run="run"):
        return [m for m in self.metrics(run) if m["split"] == "train"]

    def wait_for_steps(self, process, steps):
        path, deadline = self.folder / "run" / "metrics.jsonl", time.monotonic() + DEADLINE
        while not path.exists() or path.read_bytes().count(b"\n") < steps:
            if process.poll() is not None or time.monotonic() > deadline:
                self.fail(f"{steps} steps were not reached:\n{self.output()}")
            time.sleep(0.02)


def ranks_of(process):
    """Process ids of the trainers that run below `process`, itself included."""
    children = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
        except OSError:
            pass  # it has ended meanwhile
    found, todo = [], [process.pid]
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        try:
            if os.path.samefile(f"/proc/{pid}/exe", TRAINER):
                found.append(pid)
        except OSError:
            pass
    return sorted(found)
