#!/usr/bin/env python3
"""Perplexities that a language model must beat, from token shards.

    ngram_baseline.py --train shards/train --validation shards/validation

Unigram: additive smoothing, p(w) = (c(w) + 1) / (N + V).
Bigram: interpolated Kneser-Ney (Kneser and Ney 1995; in this form Chen and Goodman 1998), one discount
D = n1 / (n1 + 2 n2) for each order, n_k being the number of types that occur k times:

    p(w | v) = max(c(v w) - D, 0) / c(v .) + D N1+(v .) / c(v .)  p1(w)
    p1(w)    = max(N1+(. w) - D1, 0) / N1+(. .) + D1 |{w: N1+(. w) > 0}| / N1+(. .)  1 / V

where N1+(v .) counts the different words after v, and N1+(. w) the different words before w. Both models see the
shards as the trainer does: one stream, documents end to end. Perplexity is exp of the mean negative log probability
of the validation tokens, all but the first, which has no predecessor.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

import shards
from errors import DataToolError, UsageError


def unigram_perplexity(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
    counts = np.bincount(train, minlength=vocab_size)
    log_p = np.log(counts + 1.0) - np.log(len(train) + vocab_size)
    return float(np.exp(-log_p[validation[1:]].mean()))


def discount(counts: np.ndarray) -> float:
    """The estimate of Ney, Essen and Kneser. Without a type seen once or twice there is nothing to estimate from."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2.0 * twice) if once and twice else 0.5


def kneser_ney_bigram_perplexity(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
    train = train.astype(np.int64)
    validation = validation.astype(np.int64)
    types, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)  # bigram types, sorted
    before, after = types // vocab_size, types % vocab_size

    continuation = np.bincount(after, minlength=vocab_size)  # (V,) N1+(. w)
    d1 = discount(continuation)
    backed_off = d1 * (continuation > 0).sum() / len(types)
    lower = np.maximum(continuation - d1, 0.0) / len(types) + backed_off / vocab_size

    d = discount(counts)
    history = np.bincount(before, weights=counts, minlength=vocab_size)  # (V,) c(v .)
    followers = np.bincount(before, minlength=vocab_size)  # (V,) N1+(v .)

    v, w = validation[:-1], validation[1:]
    wanted = v * vocab_size + w
    slot = np.minimum(np.searchsorted(types, wanted), len(types) - 1)
    count = np.where(types[slot] == wanted, counts[slot], 0)
    seen = history[v] > 0  # a word without a successor in training leaves all to the lower order
    total = np.where(seen, history[v], 1.0)
    p = np.where(seen, np.maximum(count - d, 0.0) / total + d * followers[v] / total * lower[w], lower[w])
    return float(np.exp(-np.log(p).mean()))


def vocabulary(prefix: str, largest_id: int, given: int | None) -> int:
    """From the command line, or from the metadata that prepare.py leaves beside the shards."""
    size = given
    if size is None:
        path = pathlib.Path(prefix.removesuffix(".bin").removesuffix(".idx") + ".json")
        try:
            size = int(json.loads(path.read_bytes())["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{path}: no vocabulary size to be had there -> give --vocab-size") from None
    if largest_id >= size:
        raise DataToolError(
            f"{prefix}: token id {largest_id}, the vocabulary has {size} -> the shard belongs to another tokenizer"
        )
    return size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, metavar="PREFIX", help="shard that the models are estimated on")
    parser.add_argument("--validation", required=True, metavar="PREFIX", help="shard that is scored")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="default: from the metadata of the training shard")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    arguments = parser.parse_args()
    try:
        train = shards.MegatronShard(arguments.train).tokens
        validation = shards.MegatronShard(arguments.validation).tokens
        for name, tokens in ((arguments.train, train), (arguments.validation, validation)):
            if len(tokens) < 2:
                raise DataToolError(f"{name}: {len(tokens)} tokens; a bigram needs two -> prepare a larger shard")
        vocab_size = vocabulary(arguments.train, int(max(train.max(), validation.max())), arguments.vocab_size)
        result = {
            "unigram_perplexity": unigram_perplexity(train, validation, vocab_size),
            "bigram_perplexity": kneser_ney_bigram_perplexity(train, validation, vocab_size),
            "train_tokens": len(train),
            "validation_tokens": len(validation),
            "vocab_size": vocab_size,
        }
    except DataToolError as error:
        print(f"ngram_baseline.py: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"unigram perplexity {result['unigram_perplexity']:.1f},"
            f" bigram perplexity {result['bigram_perplexity']:.1f}"
            f" ({len(validation):,} validation tokens, {len(train):,} training tokens, vocabulary {vocab_size:,})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
