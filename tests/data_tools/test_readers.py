"""Readers: what is refused, with its place; what is skipped; and that borders between reads do not show."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import readers
import zstandard
from conftest import make_documents, read_megatron, run_tool, write_jsonl
from errors import BadDocument, DataToolError, UsageError


def read(path, **options):
    options = readers.ReadOptions(**options)
    found = []
    for block in readers.blocks(readers.expand([str(path)], options), options):
        found += readers.documents(block, options)
    return found


BAD_LINES = {
    b'{"text": "unfinished': "not JSON",
    b'["text"]': "a JSON list, not an object",
    b'{"body": "x"}': "no key 'text'; there are 'body'",
    b'{"text": 5}': "key 'text' is int, not text",
    b'{"text": null}': "key 'text' is NoneType, not text",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at offset 10",
    rb'{"text": "\ud800"}': "a lone surrogate",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good too"}\n')
    first, bad, last = read(path)
    assert (first, last) == ("good", "good too")
    assert isinstance(bad, BadDocument) and bad.where == f"{path}:3" and BAD_LINES[line] in bad.reason


def test_bad_lines_stop_the_run_or_are_skipped_and_counted(tmp_path, tokenizer_path):
    path = tmp_path / "corpus.jsonl"
    good = [json.dumps({"text": text}).encode() for text in make_documents(5)]
    path.write_bytes(b"\n".join(good[:3] + list(BAD_LINES) + [b'{"text": "  "}'] + good[3:]) + b"\n")
    common = (path, "--tokenizer", tokenizer_path, "--out", tmp_path / "out", "--validation-fraction", 0)
    stopped = run_tool("prepare.py", *common)
    assert stopped.returncode == 3 and f"{path}:4: not JSON" in stopped.stderr and "--skip-bad" in stopped.stderr
    assert not list((tmp_path / "out").glob("train*"))
    skipped = run_tool("prepare.py", *common, "--skip-bad")
    assert skipped.returncode == 0, skipped.stderr
    assert f"skipped {len(BAD_LINES)} unusable documents" in skipped.stdout and f"{path}:4:" in skipped.stdout
    assert len(read_megatron(tmp_path / "out" / "train").documents) == 5
    facts = json.loads((tmp_path / "out" / "train.json").read_text())
    assert facts["whole_input"] == {"empty_documents": 1, "skipped_documents": len(BAD_LINES)}


@pytest.mark.parametrize("kind", ["jsonl", "text"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_any_read_size_gives_the_same_documents(tmp_path, monkeypatch, kind, size):
    documents = [" " + text for text in make_documents(12, seed=3)]
    path = tmp_path / f"corpus.{kind}"
    if kind == "jsonl":
        write_jsonl(path, documents)
    else:
        path.write_bytes("\n \n\t\n\n".join(documents).join(["\n\n", "\n\n\n"]).encode())
    monkeypatch.setattr(readers, "BLOCK_BYTES", size)
    assert read(path, input_format=kind) == documents


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_an_oversized_document_is_bad_and_the_next_ones_are_found(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 16)
    path = tmp_path / f"corpus.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ["a", "b" * 500, "c", "d" * 500, "e"])
        places = (2, 4)
    else:
        path.write_bytes(b"a\n\n" + b"b\n" * 250 + b"\nc\n\n" + b"d" * 500 + b"\n\ne\n")
        places = (3, 256)
    found = read(path, input_format=kind, max_document_bytes=100)
    assert [text for text in found if isinstance(text, str)] == ["a", "c", "e"]
    assert [bad.where for bad in found if isinstance(bad, BadDocument)] == [f"{path}:{n}" for n in places]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_truncated_and_damaged_compression_is_an_error_not_an_end(tmp_path, suffix, compress):
    path = tmp_path / f"corpus.jsonl{suffix}"
    data = compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in make_documents(50)))
    assert len(data) > 2000
    for damaged in (data[:-1], data[: len(data) // 2], data[:200] + b"\x00\x01\x02\x03" * 40 + data[360:]):
        path.write_bytes(damaged)
        with pytest.raises(DataToolError, match=f"corpus.jsonl{suffix}: cannot be read past byte"):
            read(path)


def test_parquet_faults_are_named(tmp_path):
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "n": [1, 2, 3]}), path)
    found = read(path)
    assert found[0] == "one" and found[2] == "three" and found[1].where == f"{path}: row 2"
    with pytest.raises(UsageError, match="no column 'body'; there are text, n"):
        read(path, text_key="body")
    with pytest.raises(UsageError, match="column 'n' is int64, not text"):
        read(path, text_key="n")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataToolError, match="truncated, damaged or not Parquet"):
        read(path)


def test_files_of_unknown_kind_are_refused_with_what_is_known(tmp_path):
    (tmp_path / "corpus.csv").write_text("a,b\n")
    for target in (tmp_path / "corpus.csv", tmp_path):
        with pytest.raises(UsageError, match=r"\.jsonl.*--input-format"):
            read(target)
    with pytest.raises(UsageError, match="no such file"):
        read(tmp_path / "absent.jsonl")
    (tmp_path / "array.json").write_text('[{"text": "a"}]')
    with pytest.raises(DataToolError, match="a JSON array"):
        read(tmp_path / "array.json")
    (tmp_path / "latin1.txt").write_bytes("uno\n\ncittà".encode("latin-1"))
    assert read(tmp_path / "latin1.txt")[1].where == f"{tmp_path / 'latin1.txt'}:3"
