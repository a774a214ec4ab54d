"""Turns blocks of text into blocks of tokens, on worker processes, in the order given.

Each worker is a fresh process with the tokenizer loaded once; a thread of the parent feeds it. Results come back in
submission order, so the output does not depend on the number of workers. A worker ends when its pipe closes, so none
outlives a killed parent.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import os
import queue
import signal
import struct
from collections.abc import Iterable, Iterator

import numpy as np

import readers
import tokenizer_files
from errors import BadDocument, DataToolError

TRAIN, VALIDATION = 0, 1
SPLIT_NAMES = ("train", "validation")


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
    tokenizer: str
    dtype: np.dtype
    policy: str  # documents | paper
    max_tokens: int  # of a document with its BOS, policy paper
    bos_id: int | None
    eos_id: int | None
    validation_fraction: float
    seed: int
    skip_bad: bool
    read: readers.ReadOptions


@dataclasses.dataclass
class EncodedSplit:
    tokens: np.ndarray  # (tokens,) documents end to end
    lengths: np.ndarray  # (documents,) int32
    text_bytes: int


@dataclasses.dataclass
class EncodedBlock:
    splits: tuple[EncodedSplit, EncodedSplit]
    empty: int  # documents without a visible character: dropped
    bad: list[str]  # skipped documents: where and why
    consumed: int


class Encoder:
    def __init__(self, options: EncodeOptions):
        self.options = options
        self.tokenizer = tokenizer_files.load(options.tokenizer).tokenizer
        self._threshold = round(options.validation_fraction * 2.0**64)
        self._key = struct.pack("<q", options.seed)

    def split_of(self, text: bytes) -> int:
        """By the text alone: equal documents land on the same side, wherever and however often they occur."""
        digest = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        return VALIDATION if int.from_bytes(digest, "little") < self._threshold else TRAIN

    def document_tokens(self, ids: list[int]) -> list[int]:
        if self.options.policy == "paper":
            return [self.options.bos_id, *ids[: self.options.max_tokens - 1]]
        ids.append(self.options.eos_id)
        return ids

    def encode(self, block: readers.Block) -> EncodedBlock:
        texts: list[str] = []
        bad: list[str] = []
        empty = 0
        for document in readers.documents(block, self.options.read):
            if isinstance(document, BadDocument):
                if not self.options.skip_bad:
                    raise document
                bad.append(f"{document.where}: {document.reason}")
            elif not document or document.isspace():
                empty += 1
            else:
                texts.append(document)
        flat: tuple[list[int], list[int]] = ([], [])
        lengths: tuple[list[int], list[int]] = ([], [])
        text_bytes = [0, 0]
        for text, encoding in zip(texts, self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)):
            raw = text.encode()
            split = self.split_of(raw)
            tokens = self.document_tokens(encoding.ids)
            flat[split].extend(tokens)
            lengths[split].append(len(tokens))
            text_bytes[split] += len(raw)
        splits = tuple(
            EncodedSplit(np.array(flat[s], self.options.dtype), np.array(lengths[s], np.int32), text_bytes[s])
            for s in (TRAIN, VALIDATION)
        )
        return EncodedBlock(splits, empty, bad, block.consumed)


def worker_main(connection, options: EncodeOptions) -> None:
    # Workers are the unit of parallelism; threads inside each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Encoder(options)
    try:
        while True:
            block = connection.recv()
            try:
                connection.send(encoder.encode(block))
            except DataToolError as error:
                connection.send(error)
    except (EOFError, OSError):
        return  # the parent is gone or done with us


class WorkerPool:
    def __init__(self, workers: int, options: EncodeOptions):
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._idle: queue.SimpleQueue = queue.SimpleQueue()
        # Ctrl-C reaches the whole process group; only the parent acts on it. The disposition is inherited.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=worker_main, args=(theirs, options), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._idle.put((ours, process))
        finally:
            signal.signal(signal.SIGINT, previous)
        self._threads = concurrent.futures.ThreadPoolExecutor(workers)
        self._in_flight = workers + 2

    def _run(self, block: readers.Block) -> EncodedBlock:
        connection, process = self._idle.get()
        try:
            connection.send(block)
            result = connection.recv()
        except (EOFError, OSError):
            process.join(5)
            raise DataToolError(
                f"a worker process ended with code {process.exitcode} near {block.path}:{block.first}"
                " -> if it ran out of memory, use fewer --workers or a smaller --max-document-bytes"
            ) from None
        finally:
            self._idle.put((connection, process))
        if isinstance(result, DataToolError):
            raise result
        return result

    def map(self, blocks: Iterable[readers.Block]) -> Iterator[EncodedBlock]:
        """Results in the order of the blocks, of which only a few are held at a time."""
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        for block in blocks:
            pending.append(self._threads.submit(self._run, block))
            if len(pending) >= self._in_flight:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()
