"""Reads corpora as blocks of whole documents, in bounded memory whatever the input's size.

`blocks` does the cheap, sequential part (decompress, cut at document ends) and runs in one process; `documents`
does the rest (decode, parse) and runs wherever the block was sent. Blocks do not depend on who processes them.
"""

import dataclasses
import gzip
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

from errors import BadDocument, DataToolError, UsageError

BLOCK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 16 << 20

FORMATS = {
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst", ".zstd")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# One or more lines with nothing but white space end a plain-text document.
BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
LEADING_BLANK_LINES = re.compile(rb"\A(?:[ \t\r]*\n)+")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    input_format: str = "auto"  # auto | jsonl | text | parquet
    text_key: str = "text"
    text_documents: str = "blank-lines"  # blank-lines | file
    max_document_bytes: int = MAX_DOCUMENT_BYTES


@dataclasses.dataclass(frozen=True)
class Block:
    kind: str  # jsonl | text | file | rows | bad
    path: str
    first: int  # line (or Parquet row) of the first document, counted from 1
    data: Any  # bytes; for rows a list of values; for bad the reason
    consumed: int = 0  # bytes of the file on disk that this block used up


def expand(inputs: list[str], options: ReadOptions) -> list[pathlib.Path]:
    """Files in the order given; a folder stands for the files in it, at any depth, sorted by path."""
    files: list[pathlib.Path] = []
    for name in inputs:
        path = pathlib.Path(name)
        if path.is_dir():
            found = sorted(
                p for p in path.rglob("*") if p.is_file() and (options.input_format != "auto" or kind_by_name(p))
            )
            if not found:
                raise UsageError(
                    f"{path}: holds no file ending in {', '.join(FORMATS)} -> name files, or give --input-format"
                )
            files.extend(found)
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"{path}: no such file or folder")
    for path in files:
        if options.input_format == "auto" and kind_by_name(path) is None:
            raise UsageError(
                f"{path}: the name says no format; known are {', '.join(FORMATS)},"
                f" also with {', '.join(COMPRESSIONS)} -> give --input-format"
            )
    return files


def kind_by_name(path: pathlib.Path) -> str | None:
    name = pathlib.Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    return FORMATS.get(name.suffix.lower())


class ZstdStream:
    """read() over any number of frames. The library's own reader takes a truncated file for a short one."""

    def __init__(self, raw):
        import zstandard

        self._error = zstandard.ZstdError
        self._new = lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
        self._raw = raw
        self._frame = None
        self._input = b""

    def read(self, _size: int) -> bytes:
        while True:
            if not self._input:
                self._input = self._raw.read(1 << 16)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return b""
            self._frame = self._frame or self._new()
            try:
                data = self._frame.decompress(self._input)
            except self._error as error:
                raise OSError(str(error)) from None
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
            if data:
                return data


def decompressed(path: pathlib.Path, raw):
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix.lower() in (".zst", ".zstd"):
        return ZstdStream(raw)
    return raw


def blocks(files: list[pathlib.Path], options: ReadOptions) -> Iterator[Block]:
    for path in files:
        kind = options.input_format if options.input_format != "auto" else kind_by_name(path)
        if kind == "parquet":
            yield from parquet_blocks(path, options)
            continue
        with open(path, "rb") as raw:
            try:
                yield from stream_blocks(path, raw, decompressed(path, raw), kind, options)
            except (EOFError, OSError, zlib.error) as error:
                raise DataToolError(
                    f"{path}: cannot be read past byte {raw.tell()}: {error}"
                    " -> the file is truncated or damaged; fetch it again"
                ) from None


def stream_blocks(path: pathlib.Path, raw, stream, kind: str, options: ReadOptions) -> Iterator[Block]:
    whole_file = kind == "text" and options.text_documents == "file"
    limit = options.max_document_bytes
    too_long = f"a document of more than {limit} bytes (--max-document-bytes)"
    carry = b""
    line = 1
    skipping = False  # inside a document that passed the limit
    position = 0

    def block(block_kind: str, first: int, data) -> Block:
        nonlocal position
        consumed, position = raw.tell() - position, raw.tell()
        return Block(block_kind, str(path), first, data, consumed)

    first_read = True
    while chunk := stream.read(BLOCK_BYTES):
        if first_read:
            chunk = chunk.removeprefix(BYTE_ORDER_MARK)
            if kind == "jsonl" and chunk.lstrip()[:1] == b"[":
                raise DataToolError(
                    f"{path}: a JSON array, not one JSON object a line -> convert it: jq -c '.[]' FILE > FILE.jsonl"
                )
            first_read = False
        data = carry + chunk
        cut = 0 if whole_file else last_document_end(data, kind)
        if cut and skipping:
            start = first_document_end(data, kind)
            line += data.count(b"\n", 0, start)
            data, cut, skipping = data[start:], cut - start, False
        if cut:
            yield block("text" if kind == "text" else "jsonl", line, data[:cut])
            line += data.count(b"\n", 0, cut)
            data = data[cut:]
        elif skipping:
            keep = 0 if kind == "jsonl" else max(data.rfind(b"\n"), 0)  # a blank line may straddle two reads
            line += data.count(b"\n", 0, keep)
            data = data[keep:] if kind == "text" else b""
        if len(data) > limit and not skipping:
            yield block("bad", line, too_long)
            skipping = True
        carry = data
    if carry and not skipping:
        yield block("file" if whole_file else "text" if kind == "text" else "jsonl", line, carry)


def last_document_end(data: bytes, kind: str) -> int:
    if kind == "jsonl":
        return data.rfind(b"\n") + 1
    end = 0
    for match in BLANK_LINES.finditer(data):
        end = match.end()
    return end


def first_document_end(data: bytes, kind: str) -> int:
    if kind == "jsonl":
        return data.find(b"\n") + 1
    match = BLANK_LINES.search(data)
    return match.end() if match else 0


def parquet_blocks(path: pathlib.Path, options: ReadOptions) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Column chunks are streamed; by default the library would buffer whole row groups.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise DataToolError(f"{path}: {error} -> the file is truncated, damaged or not Parquet") from None
    names = file.schema_arrow.names
    if options.text_key not in names:
        raise UsageError(
            f"{path}: no column {options.text_key!r}; there are {', '.join(names)} -> choose one with --text-key"
        )
    column = file.schema_arrow.field(options.text_key).type
    value = column.value_type if pa.types.is_dictionary(column) else column
    if not (pa.types.is_string(value) or pa.types.is_large_string(value)):
        raise UsageError(f"{path}: column {options.text_key!r} is {column}, not text -> choose one with --text-key")
    size, total = path.stat().st_size, max(1, file.metadata.num_rows)
    rows: list[str | None] = []
    pending = 0
    first = 1
    try:
        for batch in file.iter_batches(batch_size=64, columns=[options.text_key]):
            for text in batch.column(0).to_pylist():
                rows.append(text)
                pending += len(text or "")
                if pending >= BLOCK_BYTES:
                    yield Block("rows", str(path), first, rows, size * len(rows) // total)
                    first += len(rows)
                    rows, pending = [], 0
    except (OSError, pa.ArrowException) as error:
        raise DataToolError(f"{path}: row {first} or later: {error} -> the file is damaged") from None
    if rows:
        yield Block("rows", str(path), first, rows, size * len(rows) // total)


def documents(block: Block, options: ReadOptions) -> Iterator[str | BadDocument]:
    """The block's documents, unusable ones as a BadDocument in their place. Empty ones are included."""
    if block.kind == "jsonl":
        for offset, line in enumerate(block.data.split(b"\n")):
            if line and not line.isspace():
                yield json_document(line, f"{block.path}:{block.first + offset}", options)
    elif block.kind == "text":
        start = 0
        line = block.first
        ends = [(m.start(), m.end()) for m in BLANK_LINES.finditer(block.data)] + [(len(block.data),) * 2]
        for end, following in ends:
            piece = LEADING_BLANK_LINES.sub(b"", block.data[start:end]).rstrip(b"\r\n")
            if piece and not piece.isspace():
                yield decoded(piece, f"{block.path}:{line}")
            line += block.data.count(b"\n", start, following)
            start = following
    elif block.kind == "file":
        yield decoded(block.data, block.path)
    elif block.kind == "rows":
        for offset, text in enumerate(block.data):
            where = f"{block.path}: row {block.first + offset}"
            if text is None:
                yield BadDocument(where, f"column {options.text_key!r} is null")
            elif len(text) > options.max_document_bytes:
                yield BadDocument(
                    where, f"a document of more than {options.max_document_bytes} bytes (--max-document-bytes)"
                )
            else:
                yield text
    else:
        yield BadDocument(f"{block.path}:{block.first}", block.data)


def decoded(data: bytes, where: str) -> str | BadDocument:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return BadDocument(where, f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start} of the document")


def json_document(line: bytes, where: str, options: ReadOptions) -> str | BadDocument:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return BadDocument(where, f"not UTF-8: byte {line[error.start]:#04x} at offset {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return BadDocument(where, f"not JSON: {error}")
    if not isinstance(record, dict):
        return BadDocument(where, f"a JSON {type(record).__name__}, not an object")
    if options.text_key not in record:
        return BadDocument(
            where, f"no key {options.text_key!r}; there are {', '.join(map(repr, list(record)[:8]))} (--text-key)"
        )
    text = record[options.text_key]
    if not isinstance(text, str):
        return BadDocument(where, f"key {options.text_key!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return BadDocument(
            where,
            f"a lone surrogate (\\u{ord(text[error.start]):04x}) at character {error.start}; it has no UTF-8 form",
        )
    return text


def total_bytes(files: list[pathlib.Path]) -> int:
    return sum(os.path.getsize(path) for path in files)
