#!/usr/bin/env python3
"""Trains a byte-level BPE tokenizer on a corpus.

    train_tokenizer.py corpus.jsonl --vocab-size 8192 --out tokenizer.json

Reads what prepare.py reads. Text is cut as Llama 3 does; ids 0 and 1 are <|begin_of_text|> and <|end_of_text|>, the
next 256 the bytes, so every text can be encoded. The same corpus always gives the same file.
"""

import argparse
import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import readers
import shards
import tokenizer_files
from errors import BadDocument, DataToolError, describe_os_error

SPECIALS = [tokenizer_files.BEGIN_OF_TEXT, tokenizer_files.END_OF_TEXT]
SMALLEST_VOCAB = 256 + len(SPECIALS)


def corpus(files: list[pathlib.Path], options: readers.ReadOptions, limit_bytes: int | None) -> Iterator[str]:
    used = 0
    for block in readers.blocks(files, options):
        for document in readers.documents(block, options):
            if isinstance(document, BadDocument):
                raise document
            if limit_bytes is not None and used >= limit_bytes:
                return
            used += len(document.encode())
            yield document


def train(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer_files.byte_level_pipeline(tokenizer, bos_id=0)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, or folders read recursively in sorted order")
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="tokens in all, the specials included"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the tokenizer.json to write")
    parser.add_argument("--limit-bytes", type=int, metavar="N", help="use the first N bytes of text only")
    parser.add_argument("--input-format", choices=("auto", "jsonl", "text", "parquet"), default="auto")
    parser.add_argument("--text-key", default="text", help="JSON key or Parquet column (default: text)")
    parser.add_argument("--text-documents", choices=("blank-lines", "file"), default="blank-lines")
    arguments = parser.parse_args()
    if not SMALLEST_VOCAB <= arguments.vocab_size < 2**31:
        parser.error(
            f"--vocab-size {arguments.vocab_size}: at least {SMALLEST_VOCAB}"
            f" (256 bytes and {len(SPECIALS)} special tokens)"
        )
    options = readers.ReadOptions(arguments.input_format, arguments.text_key, arguments.text_documents)
    try:
        files = readers.expand(arguments.inputs, options)
        tokenizer = train(corpus(files, options, arguments.limit_bytes), arguments.vocab_size)
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        if size != arguments.vocab_size:
            raise DataToolError(
                f"the corpus supports only {size} tokens, not {arguments.vocab_size}"
                f" -> give more text, or --vocab-size {size}"
            )
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        partial = pathlib.Path(f"{arguments.out}{shards.PARTIAL}")
        with contextlib.ExitStack() as cleanup:
            file = open(partial, "wb")
            cleanup.callback(partial.unlink, missing_ok=True)
            file.write(tokenizer.to_str(pretty=True).encode() + b"\n")
            shards.sync_and_close(file)
            os.replace(partial, arguments.out)
    except DataToolError as error:
        print(f"train_tokenizer.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"train_tokenizer.py: {describe_os_error(error, arguments.out)}", file=sys.stderr)
        return 3
    print(f"{arguments.out}: {size:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
