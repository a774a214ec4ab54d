#!/usr/bin/env python3
"""Turns text into token shards for training.

    prepare.py corpus.jsonl.gz --tokenizer tokenizer.json --out shards

writes shards/train.{bin,idx,json} and shards/validation.{bin,idx,json}. Inputs are JSON lines (.json, .jsonl), plain
text (.txt), both also as .gz or .zst, and Parquet; files or folders. The validation documents are chosen by a hash of
their text and the seed. The output depends on the input and the options alone, not on the number of workers, and
appears under its names only when it is whole.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import signal
import sys
import time

import encode
import readers
import shards
import tokenizer_files
from errors import DataToolError, UsageError, describe_os_error

REPORTED_BAD = 5


class Interrupted(BaseException):
    """Raised by the signal handler; not an Exception, so that nothing on the way mistakes it for a fault."""

    def __init__(self, signum: int):
        self.signum = signum


class Signals:
    """The first SIGINT or SIGTERM interrupts; a second must not cut the cleaning up short. It may have come together
    with the first: were its handler taken away by then, Python would report it with a traceback."""

    def __init__(self):
        self._ignored = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._received)

    def ignore(self) -> None:
        """From now on, to the end of the process. Not for handlers."""
        self._ignored = True
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)

    def _received(self, signum, _frame) -> None:
        if not self._ignored:
            self._ignored = True
            raise Interrupted(signum)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, or folders read recursively in sorted order")
    parser.add_argument(
        "--tokenizer", required=True, help="a tokenizer.json, or a Llama 3 tiktoken file (tokenizer.model)"
    )
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the shards")
    parser.add_argument("--overwrite", action="store_true", help="replace shards that are already there")
    group = parser.add_argument_group("reading")
    group.add_argument(
        "--input-format", choices=("auto", "jsonl", "text", "parquet"), default="auto", help="default: by file name"
    )
    group.add_argument("--text-key", default="text", help="JSON key or Parquet column (default: text)")
    group.add_argument(
        "--text-documents", choices=("blank-lines", "file"), default="blank-lines",
        help="what a document is in plain text: a part between blank lines (default), or the file",
    )  # fmt: skip
    group.add_argument(
        "--skip-bad", action="store_true", help="count and skip unusable documents instead of stopping at the first"
    )
    group.add_argument(
        "--max-document-bytes", type=int, default=readers.MAX_DOCUMENT_BYTES, metavar="N",
        help="a longer document is unusable; bounds the memory (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("documents")
    group.add_argument(
        "--policy", choices=("documents", "paper"), default="documents",
        help="documents: each whole, followed by EOS (default); paper: each cut to --max-tokens, after a BOS, no EOS",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of a document, its BOS included (paper only; default 2048)",
    )
    group.add_argument(
        "--bos-token", metavar="TOKEN", help="default: from tokenizer_config.json, or one of the usual names"
    )
    group.add_argument("--eos-token", metavar="TOKEN", help="likewise")
    group.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        metavar="F",
        help="share of the documents; 0: no validation shard (default 0.01)",
    )
    group.add_argument("--seed", type=int, default=42, help="of the train/validation split (default 42)")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format", choices=("megatron", "llmc"), default="megatron", help="default: megatron (.bin/.idx)"
    )
    group.add_argument(
        "--shard-tokens",
        type=int,
        default=100_000_000,
        metavar="N",
        help="tokens per file, llmc only (default: %(default)s)",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="worker processes (default: one per core)",
    )
    arguments = parser.parse_args()
    for name, low, high in (
        ("workers", 1, 4096), ("max_tokens", 2, 2**31 - 1), ("shard_tokens", 1, 2**31 - 1),
        ("max_document_bytes", 1, 2**31 - 1), ("seed", -(2**63), 2**63 - 1),
    ):  # fmt: skip
        if not low <= getattr(arguments, name) <= high:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: allowed is {low} to {high}")
    if not 0.0 <= arguments.validation_fraction < 1.0:
        parser.error(f"--validation-fraction {arguments.validation_fraction}: allowed is 0 up to, not including, 1")
    return arguments


@contextlib.contextmanager
def exclusive(folder: pathlib.Path):
    """Holds the folder's lock; the system drops it when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".prepare.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder}: another prepare.py is writing here -> wait for it, or choose another --out"
            ) from None
        yield


def existing_outputs(folder: pathlib.Path) -> list[pathlib.Path]:
    names = [f"{split}.{kind}" for split in encode.SPLIT_NAMES for kind in ("bin", "idx", "json")]
    found = [folder / name for name in names if (folder / name).exists()]
    for split in encode.SPLIT_NAMES:
        found += sorted(folder.glob(f"{split}_[0-9][0-9][0-9][0-9][0-9][0-9].bin"))
    return found


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int):
        from tqdm import tqdm

        interval = 0.2 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=total, unit="B", unit_scale=True, desc="tokenizing", mininterval=interval, file=sys.stderr
        )

    def update(self, consumed: int, tokens: int) -> None:
        self._bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
        self._bar.update(consumed)

    def close(self) -> None:
        self._bar.close()


class Totals:
    def __init__(self):
        self.text_bytes = [0, 0]
        self.empty = 0
        self.bad = 0
        self.bad_examples: list[str] = []

    def add(self, block: encode.EncodedBlock) -> None:
        for split, part in enumerate(block.splits):
            self.text_bytes[split] += part.text_bytes
        self.empty += block.empty
        self.bad += len(block.bad)
        self.bad_examples += block.bad[: REPORTED_BAD - len(self.bad_examples)]


def metadata(
    arguments,
    options: encode.EncodeOptions,
    tokenizer: tokenizer_files.TokenizerFile,
    writer,
    split: int,
    totals: Totals,
) -> dict:
    return {
        "format": arguments.format,
        "files": [path.name for path in writer.paths()],
        "token_type": {2: "uint16", 4: "uint32" if arguments.format == "llmc" else "int32"}[options.dtype.itemsize],
        "tokens": writer.tokens,
        "documents": writer.documents,
        "text_bytes": totals.text_bytes[split],
        "vocab_size": tokenizer.vocab_size,
        "bos_id": options.bos_id,
        "eos_id": options.eos_id,
        "tokenizer": {"file": "tokenizer.json", "source_sha256": tokenizer.sha256},
        "policy": options.policy,
        "max_tokens": options.max_tokens if options.policy == "paper" else None,
        "split": {
            "name": encode.SPLIT_NAMES[split],
            "validation_fraction": options.validation_fraction,
            "seed": options.seed,
        },
        "whole_input": {"empty_documents": totals.empty, "skipped_documents": totals.bad},
    }


def encode_options(arguments, tokenizer: tokenizer_files.TokenizerFile) -> encode.EncodeOptions:
    config_bos, config_eos = tokenizer_files.config_tokens(arguments.tokenizer)

    def special(name, config_value, candidates, flag, needed):
        try:
            return tokenizer.special_id(name, config_value, candidates, flag)
        except UsageError:
            if needed or name:
                raise
            return None

    paper = arguments.policy == "paper"
    return encode.EncodeOptions(
        tokenizer=arguments.tokenizer,
        dtype=shards.token_type(tokenizer.vocab_size),
        policy=arguments.policy,
        max_tokens=arguments.max_tokens,
        bos_id=special(arguments.bos_token, config_bos, tokenizer_files.BOS_NAMES, "--bos-token", paper),
        eos_id=special(arguments.eos_token, config_eos, tokenizer_files.EOS_NAMES, "--eos-token", not paper),
        validation_fraction=arguments.validation_fraction,
        seed=arguments.seed,
        skip_bad=arguments.skip_bad,
        read=readers.ReadOptions(
            arguments.input_format, arguments.text_key, arguments.text_documents, arguments.max_document_bytes
        ),
    )


def check_totals(writers, totals: Totals) -> None:
    if sum(writer.documents for writer in writers) == 0:
        raise DataToolError(
            f"the input holds no document ({totals.empty} empty, {totals.bad} skipped) -> nothing was written"
        )
    for split, writer in enumerate(writers):
        if writer.documents == 0:
            raise DataToolError(
                f"no document of {sum(w.documents for w in writers)} fell to the {encode.SPLIT_NAMES[split]} split"
                " -> change --validation-fraction or --seed, or give --validation-fraction 0"
            )


def run(arguments: argparse.Namespace, signals: Signals) -> None:
    tokenizer = tokenizer_files.load(arguments.tokenizer)
    options = encode_options(arguments, tokenizer)
    files = readers.expand(arguments.inputs, options.read)
    with exclusive(arguments.out):  # makes the folder, so not before the arguments are known to be good
        write_shards(arguments, tokenizer, options, files, signals)


def write_shards(arguments, tokenizer, options: encode.EncodeOptions, files, signals: Signals) -> None:
    started = time.monotonic()
    obsolete = existing_outputs(arguments.out)
    if obsolete and not arguments.overwrite:
        raise UsageError(f"{obsolete[0]}: already there -> give --overwrite to replace it, or choose another --out")
    for split in encode.SPLIT_NAMES:
        for stale in arguments.out.glob(f"{split}*{shards.PARTIAL}"):
            stale.unlink()

    def new_writer(name: str):
        if arguments.format == "llmc":
            return shards.LlmcWriter(arguments.out / name, options.dtype, arguments.shard_tokens)
        return shards.MegatronWriter(arguments.out / name, options.dtype)

    split_count = 2 if arguments.validation_fraction > 0 else 1
    totals = Totals()
    with contextlib.ExitStack() as cleanup:
        writers = []
        for name in encode.SPLIT_NAMES[:split_count]:
            writers.append(new_writer(name))
            cleanup.callback(writers[-1].abandon)
        pool = encode.WorkerPool(arguments.workers, options)
        cleanup.callback(pool.close)
        progress = Progress(readers.total_bytes(files))
        cleanup.callback(progress.close)
        for block in pool.map(readers.blocks(files, options.read)):
            for writer, part in zip(writers, block.splits):
                writer.append(part.tokens, part.lengths)
            totals.add(block)
            progress.update(block.consumed, sum(writer.tokens for writer in writers))
        progress.close()
        check_totals(writers, totals)
        finished = []
        for split, writer in enumerate(writers):
            writer.finish()
            finished += writer.paths()
            finished.append(arguments.out / f"{encode.SPLIT_NAMES[split]}.json")
            cleanup.callback(pathlib.Path(f"{finished[-1]}{shards.PARTIAL}").unlink, missing_ok=True)
            write_synced(
                finished[-1],
                json.dumps(metadata(arguments, options, tokenizer, writer, split, totals), indent=2) + "\n",
            )
        finished.append(arguments.out / "tokenizer.json")
        cleanup.callback(pathlib.Path(f"{finished[-1]}{shards.PARTIAL}").unlink, missing_ok=True)
        write_synced(finished[-1], tokenizer.tokenizer.to_str(pretty=True) + "\n")
        signals.ignore()  # the renames take no time, and half of them would lose the older shards
        shards.commit(finished, obsolete)
    report(arguments.out, writers, totals, tokenizer.vocab_size, time.monotonic() - started)


def write_synced(path: pathlib.Path, text: str) -> None:
    """Writes PATH.partial, for shards.commit to rename."""
    file = open(f"{path}{shards.PARTIAL}", "wb")
    file.write(text.encode())
    shards.sync_and_close(file)


def report(folder: pathlib.Path, writers, totals: Totals, vocab_size: int, seconds: float) -> None:
    for split, writer in enumerate(writers):
        print(
            f"{folder / encode.SPLIT_NAMES[split]}: {writer.tokens:,} tokens,"
            f" {writer.documents:,} documents, {totals.text_bytes[split] / 1e6:.2f} MB of text"
        )
    tokens = sum(writer.tokens for writer in writers)
    print(
        f"vocabulary {vocab_size:,}; {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s,"
        f" {sum(totals.text_bytes) / 1e6 / seconds:.2f} MB/s"
    )
    if totals.empty:
        print(f"dropped {totals.empty:,} empty documents")
    if totals.bad:
        print(f"skipped {totals.bad:,} unusable documents, the first of them:")
        for example in totals.bad_examples:
            print(f"  {example}")


def attempt(arguments: argparse.Namespace, signals: Signals) -> int:
    try:
        run(arguments, signals)
    except DataToolError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"prepare.py: {describe_os_error(error, arguments.out)}", file=sys.stderr)
        return 3
    return 0


def main() -> int:
    arguments = parse_arguments()
    signals = Signals()
    try:
        return attempt(arguments, signals)
    except Interrupted as interruption:
        signals.ignore()
        print(f"prepare.py: {signal.Signals(interruption.signum).name}: stopped, nothing was written", file=sys.stderr)
        return 128 + interruption.signum


if __name__ == "__main__":
    sys.exit(main())
