"""Stopped at any instant, prepare.py leaves no shard that looks whole and is not."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import shards
from conftest import TOOLS, make_documents, read_megatron, run_tool, write_jsonl


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("large") / "corpus.jsonl"
    block = write_jsonl(path, make_documents(2000)).read_bytes()
    path.write_bytes(block * (1 + (30 << 20) // len(block)))
    return path


def started(corpus, tokenizer_path, out) -> subprocess.Popen:
    """A run that has begun to write tokens."""
    arguments = [corpus, "--tokenizer", tokenizer_path, "--out", out, "--workers", 2, "--overwrite"]
    process = subprocess.Popen(
        [sys.executable, str(TOOLS / "prepare.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    partial = out / "train.bin.partial"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 0):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no token was written within a minute"
        time.sleep(0.02)
    return process


def children(pid: int) -> list[int]:
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_removes_what_it_had_written(tmp_path, large_corpus, tokenizer_path, signum):
    out = tmp_path / "out"
    process = started(large_corpus, tokenizer_path, out)
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert "nothing was written" in stderr and "Traceback" not in stderr
    assert [path.name for path in out.iterdir()] == [".prepare.lock"]


def test_two_signals_at_once_end_the_run_as_one_does(tmp_path, large_corpus, tokenizer_path):
    process = started(large_corpus, tokenizer_path, tmp_path / "out")
    for signum in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(signum)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "nothing was written" in stderr and "Traceback" not in stderr and "Error" not in stderr, stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".prepare.lock"]


def test_killed_outright_it_leaves_old_shards_whole_no_new_ones_and_no_workers(tmp_path, large_corpus, tokenizer_path):
    out = tmp_path / "out"
    small = write_jsonl(tmp_path / "small.jsonl", make_documents(20))
    arguments = ("--tokenizer", tokenizer_path, "--out", out, "--validation-fraction", 0.5)
    assert run_tool("prepare.py", small, *arguments).returncode == 0
    before = read_megatron(out / "train")

    process = started(large_corpus, tokenizer_path, out)
    workers = children(process.pid)
    assert len(workers) >= 2
    refused = run_tool("prepare.py", small, *arguments, "--overwrite")
    assert refused.returncode == 2 and "another prepare.py" in refused.stderr
    process.kill()
    process.communicate()
    assert read_megatron(out / "train") == before
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.05)

    assert (out / "train.bin.partial").exists()  # left behind, under no shard's name
    assert run_tool("prepare.py", small, *arguments, "--overwrite").returncode == 0
    assert not list(out.glob("*.partial")) and read_megatron(out / "train") == before


def test_a_dead_worker_is_an_error_that_says_so(tmp_path, large_corpus, tokenizer_path):
    out = tmp_path / "out"
    process = started(large_corpus, tokenizer_path, out)
    for pid in children(process.pid):
        if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            break
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 3 and "worker process ended with code -9" in stderr
    assert [path.name for path in out.iterdir()] == [".prepare.lock"]


def write_pair(prefix: pathlib.Path, documents: list[list[int]]) -> list[pathlib.Path]:
    writer = shards.MegatronWriter(prefix, np.dtype("<u2"))
    for tokens in documents:
        writer.append(np.array(tokens, np.uint16), np.array([len(tokens)], np.int32))
    writer.finish()
    return writer.paths()


def test_at_every_instant_of_the_commit_an_index_stands_only_beside_its_own_tokens(tmp_path, monkeypatch):
    """The worst case: older shards are replaced, and the process dies before the n-th unlink or rename."""
    old, new = [[1, 2, 3], [4]], [[5, 6], [7], [8]]

    class Died(Exception):
        pass

    whole = set()
    for last in range(100):
        folder = tmp_path / str(last)
        folder.mkdir()
        for name in ("train", "validation"):
            shards.commit(write_pair(folder / name, old), [])
        finished = [path for name in ("train", "validation") for path in write_pair(folder / name, new)]
        steps = 0

        def dying(original, limit=last):
            def step(*arguments, **options):
                nonlocal steps
                if steps == limit:
                    raise Died
                steps += 1
                return original(*arguments, **options)

            return step

        with monkeypatch.context() as patch:
            patch.setattr(shards.os, "rename", dying(os.rename))
            patch.setattr(pathlib.Path, "unlink", dying(pathlib.Path.unlink))
            try:
                shards.commit(finished, list(finished))
                died = False
            except Died:
                died = True
        for name in ("train", "validation"):
            if (folder / f"{name}.idx").exists():
                documents = read_megatron(folder / name).documents
                assert documents in (old, new)
                whole.add((name, documents == new))
        if not died:
            break
    assert last == 8 and len(whole) == 4


@pytest.mark.parametrize("tool", ["prepare.py", "train_tokenizer.py", "prepare.py --format llmc"])
def test_a_full_disk_leaves_nothing_behind_and_is_named(tmp_path, large_corpus, tokenizer_path, documents, tool):
    """A limit on the size of files stands for it: writing fails, and so does closing what is still buffered."""
    name, *options = tool.split()
    out = tmp_path / "out"
    if name == "prepare.py":
        arguments = [large_corpus, "--tokenizer", tokenizer_path, "--out", out, "--workers", 1, *options]
        target = out
    else:
        target = out / "tokenizer.json"
        arguments = [write_jsonl(tmp_path / "small.jsonl", documents), "--vocab-size", 300, "--out", target]
    result = subprocess.run(
        [sys.executable, str(TOOLS / name), *map(str, arguments)],
        capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10)),
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    assert f"{target}: File too large -> check" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in out.iterdir() if path.name != ".prepare.lock"] == []
