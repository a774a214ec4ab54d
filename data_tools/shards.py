"""Token shards on disk: Megatron-style .bin/.idx pairs and llm.c .bin files.

Megatron pair (little endian): PREFIX.bin holds the tokens and nothing else; PREFIX.idx holds
    magic "MMIDIDX\\0\\0" (9 bytes), version 1 (uint64), token type (uint8: 4 = int32, 8 = uint16),
    number of sequences n (uint64), length of the document index m (uint64),
    sequence lengths in tokens (n x int32), sequence offsets in bytes (n x int64),
    document index (m x int64): document d is the sequences [index[d], index[d+1]), so m is documents + 1.
Here every document is one sequence.

llm.c file: 256 int32 (magic, version, number of tokens, zeros), then the tokens.
    magic 20240520, version 1: uint16 tokens;  magic 20240801, version 7: uint32 tokens.

Writers fill `*.partial` files; nothing carries its final name before `commit`, which syncs first and renames the
.idx last. A pair without its .idx is not a shard, so no interruption leaves half of one that looks whole.
"""

import contextlib
import os
import pathlib
import struct

import numpy as np

from errors import DataToolError

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
TYPE_CODES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}
# Megatron's own rule; vocabularies just under 2^16 are left out so that padding them keeps the type.
UINT16_VOCAB_LIMIT = 65500

LLMC_HEADER_INTS = 256
LLMC_KINDS = {np.dtype("<u2"): (20240520, 1), np.dtype("<u4"): (20240801, 7)}
LLMC_MAX_TOKENS = 2**31 - 1  # the header counts tokens in an int32

COPY_ITEMS = 1 << 20
PARTIAL = ".partial"


def token_type(vocab_size: int) -> np.dtype:
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_close(file) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def close_abandoned(file) -> None:
    """Closing writes what is buffered, which a full disk refuses; of a file that is removed that is no fault."""
    with contextlib.suppress(OSError):
        file.close()


class MegatronWriter:
    """Appends documents to PREFIX.bin/.idx. Memory does not grow: lengths go straight to the index file."""

    def __init__(self, prefix: pathlib.Path, dtype: np.dtype):
        self.dtype = dtype
        self.tokens = 0
        self.documents = 0
        self.bin_path = prefix.with_name(prefix.name + ".bin")
        self.idx_path = prefix.with_name(prefix.name + ".idx")
        self._bin = open(f"{self.bin_path}{PARTIAL}", "wb", buffering=1 << 20)
        self._idx = open(f"{self.idx_path}{PARTIAL}", "w+b", buffering=1 << 20)
        self._idx.write(bytes(HEADER_BYTES))  # counts are known at the end

    def paths(self) -> list[pathlib.Path]:
        return [self.bin_path, self.idx_path]

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Adds len(lengths) documents lying end to end in `tokens`."""
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._idx.write(lengths.astype("<i4", copy=False).tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)

    def finish(self) -> None:
        """Writes what the lengths imply, and syncs. The files still have their partial names."""
        offset = 0  # int64 from here on: shards pass 4 GB
        self._idx.flush()
        for start in range(0, self.documents, COPY_ITEMS):
            self._idx.seek(HEADER_BYTES + 4 * start)
            count = min(COPY_ITEMS, self.documents - start)
            lengths = np.frombuffer(self._idx.read(4 * count), dtype="<i4").astype(np.int64)
            ends = offset + np.cumsum(lengths * self.dtype.itemsize)
            self._idx.seek(HEADER_BYTES + 4 * self.documents + 8 * start)
            self._idx.write((ends - lengths * self.dtype.itemsize).astype("<i8").tobytes())
            offset = int(ends[-1])
        self._idx.seek(0, os.SEEK_END)
        for start in range(0, self.documents + 1, COPY_ITEMS):
            self._idx.write(np.arange(start, min(start + COPY_ITEMS, self.documents + 1), dtype="<i8").tobytes())
        self._idx.seek(0)
        self._idx.write(MAGIC + struct.pack("<QBQQ", 1, TYPE_CODES[self.dtype], self.documents, self.documents + 1))
        sync_and_close(self._bin)
        sync_and_close(self._idx)

    def abandon(self) -> None:
        for file, path in ((self._bin, self.bin_path), (self._idx, self.idx_path)):
            pathlib.Path(f"{path}{PARTIAL}").unlink(missing_ok=True)
            close_abandoned(file)


class LlmcWriter:
    """Appends documents to PREFIX_000000.bin, PREFIX_000001.bin, ... of at most `shard_tokens` tokens."""

    def __init__(self, prefix: pathlib.Path, dtype: np.dtype, shard_tokens: int):
        self.dtype = np.dtype("<u4") if dtype.itemsize == 4 else dtype
        self.shard_tokens = min(shard_tokens, LLMC_MAX_TOKENS)
        self.tokens = 0
        self.documents = 0
        self._prefix = prefix
        self._paths: list[pathlib.Path] = []
        self._file = None
        self._in_shard = 0

    def paths(self) -> list[pathlib.Path]:
        return list(self._paths)

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        tokens = tokens.astype(self.dtype, copy=False)
        self.tokens += len(tokens)
        self.documents += len(lengths)
        while len(tokens):
            if self._file is None:
                self._open_shard()
            taken = tokens[: self.shard_tokens - self._in_shard]
            self._file.write(taken.tobytes())
            self._in_shard += len(taken)
            tokens = tokens[len(taken) :]
            if self._in_shard == self.shard_tokens:
                self._close_shard()

    def _open_shard(self) -> None:
        path = self._prefix.with_name(f"{self._prefix.name}_{len(self._paths):06d}.bin")
        self._paths.append(path)
        self._file = open(f"{path}{PARTIAL}", "wb", buffering=1 << 20)
        self._file.write(bytes(4 * LLMC_HEADER_INTS))
        self._in_shard = 0

    def _close_shard(self) -> None:
        header = np.zeros(LLMC_HEADER_INTS, dtype="<i4")
        header[:2] = LLMC_KINDS[self.dtype]
        header[2] = self._in_shard
        self._file.seek(0)
        self._file.write(header.tobytes())
        sync_and_close(self._file)
        self._file = None

    def finish(self) -> None:
        if self._file is not None:
            self._close_shard()

    def abandon(self) -> None:
        for path in self._paths:
            pathlib.Path(f"{path}{PARTIAL}").unlink(missing_ok=True)
        if self._file is not None:
            close_abandoned(self._file)


def commit(finished: list[pathlib.Path], obsolete: list[pathlib.Path]) -> None:
    """Gives finished partial files their names: every .idx of an older run goes first, every new .idx comes last.

    So at no instant does an index stand beside tokens that are not its own.
    """
    order = {".bin": 0, ".idx": 1}
    for path in sorted(obsolete, key=lambda p: order.get(p.suffix, 2), reverse=True):
        path.unlink(missing_ok=True)
    folders = {path.parent for path in finished}
    for folder in folders:
        sync_folder(folder)
    for path in sorted(finished, key=lambda p: order.get(p.suffix, 2)):
        os.rename(f"{path}{PARTIAL}", path)
    for folder in folders:
        sync_folder(folder)


class MegatronShard:
    """Reads a pair: `tokens` is the whole stream (memory-mapped), `lengths` the documents in it."""

    def __init__(self, prefix: str | os.PathLike):
        prefix = str(prefix)
        prefix = prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix
        idx, tokens = pathlib.Path(prefix + ".idx"), pathlib.Path(prefix + ".bin")
        for path in (idx, tokens):
            if not path.is_file():
                raise DataToolError(
                    f"{path}: no such file -> give the prefix of a .bin/.idx pair written by prepare.py"
                )
        with open(idx, "rb") as file:
            header = file.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES or header[:9] != MAGIC:
                raise DataToolError(f"{idx}: does not begin with {MAGIC!r} -> this is not a Megatron-style index")
            version, code, sequences, index_length = struct.unpack("<QBQQ", header[9:])
            types = {value: key for key, value in TYPE_CODES.items()}
            if version != 1 or code not in types:
                raise DataToolError(
                    f"{idx}: version {version} and token type {code}; version 1 and types {sorted(types)} are allowed"
                )
            expected = HEADER_BYTES + 12 * sequences + 8 * index_length
            if os.path.getsize(idx) < expected:
                raise DataToolError(
                    f"{idx}: {os.path.getsize(idx)} bytes, {expected} needed by its own counts -> the file is truncated"
                )
            self.lengths = np.fromfile(file, dtype="<i4", count=sequences)
            self.offsets = np.fromfile(file, dtype="<i8", count=sequences)
            self.document_index = np.fromfile(file, dtype="<i8", count=index_length)
        self.dtype = types[code]
        count = int(self.lengths.sum(dtype=np.int64))
        if os.path.getsize(tokens) != count * self.dtype.itemsize:
            raise DataToolError(
                f"{tokens}: {os.path.getsize(tokens)} bytes, the index counts {count} tokens of {self.dtype.itemsize}"
            )
        self.tokens = np.memmap(tokens, dtype=self.dtype, mode="r") if count else np.zeros(0, self.dtype)
