"""Times prepare.py (start, reading, writing and syncing included) and the tokenizers library alone, in turns.

The library is timed from strings in memory to encodings, as encode_batch with its own threads and as the faster
encode_batch_fast, so that the better of the two is known as well. CPU seconds are printed too: on a busy machine they
tell more than the clock.
"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from tokenizers import Tokenizer

ROUNDS = 3
COPIES = 3  # of the corpus, so that start-up does not hide the rate; the library gets the same text
BATCH = 1000
PREPARE = pathlib.Path(__file__).resolve().parents[2] / "data_tools" / "prepare.py"


class Timing(NamedTuple):
    wall_seconds: float
    cpu_seconds: float


def cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def library_time(tokenizer_path: str, texts: list[str], method: str) -> Timing:
    tokenizer = Tokenizer.from_file(tokenizer_path)  # anew: a word cache must not carry over
    encode = getattr(tokenizer, method)
    started, used = time.perf_counter(), cpu_seconds(resource.RUSAGE_SELF)
    for start in range(0, len(texts), BATCH):
        encode(texts[start : start + BATCH], add_special_tokens=False)
    return Timing(time.perf_counter() - started, cpu_seconds(resource.RUSAGE_SELF) - used)


def prepare_time(tokenizer_path: str, corpus: str, folder: str) -> Timing:
    command = [sys.executable, str(PREPARE), corpus, "--tokenizer", tokenizer_path, "--out", folder, "--overwrite"]
    started, used = time.perf_counter(), cpu_seconds(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Timing(time.perf_counter() - started, cpu_seconds(resource.RUSAGE_CHILDREN) - used)


def main() -> None:
    corpus_path, tokenizer_path = sys.argv[1:]
    with open(corpus_path, encoding="utf-8") as file:
        lines = file.readlines() * COPIES
    texts = [json.loads(line)["text"] for line in lines]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    times: dict[str, list[Timing]] = {"encode_batch": [], "encode_batch_fast": [], "prepare.py": []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = os.path.join(folder, "corpus.jsonl")
        with open(corpus, "w", encoding="utf-8") as file:
            file.writelines(lines)
        for _ in range(ROUNDS):
            for method in ("encode_batch", "encode_batch_fast"):
                times[method].append(library_time(tokenizer_path, texts, method))
            times["prepare.py"].append(prepare_time(tokenizer_path, corpus, os.path.join(folder, "shards")))
    print(f"{megabytes:.1f} MB of text, {len(os.sched_getaffinity(0))} cores, median of {ROUNDS} rounds")
    median = {name: statistics.median(t.wall_seconds for t in timings) for name, timings in times.items()}
    for name, timings in times.items():
        cpu = statistics.median(t.cpu_seconds for t in timings)
        print(f"  {name:18} {megabytes / median[name]:6.2f} MB/s   {median[name]:6.1f} s, {cpu:6.1f} s of CPU")
    for method in ("encode_batch", "encode_batch_fast"):
        print(f"prepare.py at {100 * median[method] / median['prepare.py']:.0f}% of {method}")


if __name__ == "__main__":
    main()
