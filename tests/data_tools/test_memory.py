"""Memory does not grow with the input."""

import subprocess
import sys

import pytest
from conftest import TOOLS
from tokenizers import Tokenizer, models, pre_tokenizers

MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)  # KiB, the largest of all descendants
"""


@pytest.fixture(scope="module")
def quick_tokenizer(tmp_path_factory):
    """Long words make a tokenizer whose speed lets a test read a lot."""
    tokenizer = Tokenizer(models.WordLevel({"a" * 250: 0, "b" * 250: 1, "</s>": 2}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("quick") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_peak_memory_is_the_same_for_ten_times_the_input(tmp_path, quick_tokenizer, kind):
    text = " ".join(["a" * 250, "b" * 250] * 8)
    document = f'{{"text": "{text}"}}\n' if kind == "jsonl" else text + "\n\n"
    peaks = []
    for megabytes in (8, 80):
        corpus = tmp_path / f"corpus{megabytes}.{kind}"
        corpus.write_text(document * (megabytes * 1_000_000 // len(document)))
        command = [sys.executable, str(TOOLS / "prepare.py"), str(corpus), "--tokenizer", str(quick_tokenizer)]
        command += ["--out", str(tmp_path / f"out{megabytes}"), "--validation-fraction", "0", "--workers", "2"]
        result = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True)
        peaks.append(int(result.stdout) / 1024)
        corpus.unlink()
    assert peaks[1] < peaks[0] + 16, f"{peaks} MiB"
