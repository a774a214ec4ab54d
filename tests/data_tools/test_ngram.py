"""The n-gram baselines against counting done the slow way, straight from the formulas."""

import collections
import json
import math
import random
import time

import ngram_baseline
import numpy as np
import pytest
import shards
from conftest import run_tool


def brute_force_bigram(train, validation, vocab_size):
    bigrams = collections.Counter(zip(train, train[1:]))
    continuations = collections.Counter(w for _, w in bigrams)

    def discount(counts):
        n1, n2 = (sum(1 for c in counts if c == k) for k in (1, 2))
        return n1 / (n1 + 2 * n2) if n1 and n2 else 0.5

    d, d1 = discount(bigrams.values()), discount(continuations.values())

    def lower(w):
        mass = max(continuations[w] - d1, 0) if w in continuations else 0
        return mass / len(bigrams) + d1 * len(continuations) / len(bigrams) / vocab_size

    total = 0.0
    for v, w in zip(validation, validation[1:]):
        history = sum(c for (a, _), c in bigrams.items() if a == v)
        followers = sum(1 for a, _ in bigrams if a == v)
        if history:
            p = max(bigrams[v, w] - d, 0) / history + d * followers / history * lower(w)
        else:
            p = lower(w)
        total -= math.log(p)
    return math.exp(total / (len(validation) - 1))


@pytest.mark.parametrize("seed", range(6))
def test_bigram_equals_brute_force(seed):
    rng = random.Random(seed)
    vocab_size = 9
    weights = [1 / (1 + n) for n in range(vocab_size - 1)]  # the last token never occurs in training
    train = rng.choices(range(vocab_size - 1), weights, k=60)
    validation = rng.choices(range(vocab_size), k=40)
    found = ngram_baseline.kneser_ney_bigram_perplexity(
        np.array(train, np.uint16), np.array(validation, np.uint16), vocab_size
    )
    assert found == pytest.approx(brute_force_bigram(train, validation, vocab_size), rel=1e-12)


def test_bigram_probabilities_sum_to_one():
    rng = random.Random(7)
    train = np.array(rng.choices(range(7), [5, 4, 3, 2, 2, 1, 1], k=80), np.uint16)
    for v in range(8):  # 7 has no history
        perplexities = [
            ngram_baseline.kneser_ney_bigram_perplexity(train, np.array([v, w], np.uint16), 8) for w in range(8)
        ]
        assert sum(1 / p for p in perplexities) == pytest.approx(1, rel=1e-12)


def test_unigram_equals_the_formula():
    train, validation = np.array([0, 0, 1, 2]), np.array([3, 0, 1, 3])
    expected = math.exp(-(math.log(3 / 8) + math.log(2 / 8) + math.log(1 / 8)) / 3)  # the first token is not scored
    assert ngram_baseline.unigram_perplexity(train, validation, 4) == pytest.approx(expected, rel=1e-12)


def test_command_line_scores_two_million_tokens_in_seconds(tmp_path):
    rng = np.random.default_rng(1)
    for name, count in (("train", 2_000_000), ("validation", 50_000)):
        tokens = np.minimum(rng.zipf(1.3, count), 8191).astype(np.uint16)
        writer = shards.MegatronWriter(tmp_path / name, np.dtype("<u2"))
        writer.append(tokens, np.array([count], np.int32))
        writer.finish()
        shards.commit(writer.paths(), [])
    arguments = ("--train", tmp_path / "train", "--validation", tmp_path / "validation")
    refused = run_tool("ngram_baseline.py", *arguments)
    assert refused.returncode == 2 and "--vocab-size" in refused.stderr
    started = time.monotonic()
    result = run_tool("ngram_baseline.py", *arguments, "--vocab-size", 8192, "--json")
    assert time.monotonic() - started < 20
    found = json.loads(result.stdout)
    # Independent draws: the entropy of the source bounds both, and a bigram model gains nothing.
    assert 10 < found["unigram_perplexity"] <= found["bigram_perplexity"] * 1.05
    assert (found["train_tokens"], found["validation_tokens"]) == (2_000_000, 50_000)
    small = run_tool("ngram_baseline.py", *arguments, "--vocab-size", 100)
    assert small.returncode == 3 and "token id 8191" in small.stderr
    (tmp_path / "train.bin").write_bytes(b"\x00" * 10)
    broken = run_tool("ngram_baseline.py", *arguments, "--vocab-size", 8192)
    assert broken.returncode == 3 and "train.bin: 10 bytes" in broken.stderr
