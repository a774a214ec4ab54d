"""Times prepare.py (start, reading, writing and syncing included) and the tokenizers library alone, in turns.

The library is timed from strings in memory to encodings, as encode_batch with its own threads and as the faster
encode_batch_fast, so that the better of the two is known as well.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from tokenizers import Tokenizer

ROUNDS = 3
COPIES = 3  # of the corpus, so that start-up does not hide the rate; the library gets the same text
BATCH = 1000
PREPARE = pathlib.Path(__file__).resolve().parents[2] / "data_tools" / "prepare.py"


def library_seconds(tokenizer_path: str, texts: list[str], method: str) -> float:
    tokenizer = Tokenizer.from_file(tokenizer_path)  # anew: a word cache must not carry over
    encode = getattr(tokenizer, method)
    started = time.perf_counter()
    for start in range(0, len(texts), BATCH):
        encode(texts[start : start + BATCH], add_special_tokens=False)
    return time.perf_counter() - started


def prepare_seconds(tokenizer_path: str, corpus: str, folder: str) -> float:
    command = [sys.executable, str(PREPARE), corpus, "--tokenizer", tokenizer_path, "--out", folder, "--overwrite"]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    corpus_path, tokenizer_path = sys.argv[1:]
    with open(corpus_path, encoding="utf-8") as file:
        lines = file.readlines() * COPIES
    texts = [json.loads(line)["text"] for line in lines]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    seconds: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": [], "prepare.py": []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = os.path.join(folder, "corpus.jsonl")
        with open(corpus, "w", encoding="utf-8") as file:
            file.writelines(lines)
        for _ in range(ROUNDS):
            for method in ("encode_batch", "encode_batch_fast"):
                seconds[method].append(library_seconds(tokenizer_path, texts, method))
            seconds["prepare.py"].append(prepare_seconds(tokenizer_path, corpus, os.path.join(folder, "shards")))
    print(f"{megabytes:.1f} MB of text, {len(os.sched_getaffinity(0))} cores, median of {ROUNDS} rounds")
    for name, values in seconds.items():
        print(
            f"  {name:18} {megabytes / statistics.median(values):6.2f} MB/s   {', '.join(f'{v:.1f} s' for v in values)}"
        )
    for method in ("encode_batch", "encode_batch_fast"):
        ratio = statistics.median(seconds[method]) / statistics.median(seconds["prepare.py"])
        print(f"prepare.py at {100 * ratio:.0f}% of {method}")


if __name__ == "__main__":
    main()
