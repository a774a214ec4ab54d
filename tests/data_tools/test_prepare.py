"""prepare.py end to end: what goes in comes out, exactly, in every format and by every policy."""

import gzip
import hashlib
import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import make_documents, read_megatron, run_tool, write_jsonl
from tokenizers import Tokenizer


def prepare(out, tokenizer_path, *arguments):
    result = run_tool("prepare.py", *arguments, "--tokenizer", tokenizer_path, "--out", out)
    assert result.returncode == 0, result.stderr
    return result


def test_whole_documents_come_back_exactly_with_an_eos_each(tmp_path, tokenizer_path, documents):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", documents)
    prepare(tmp_path / "out", tokenizer_path, corpus, "--validation-fraction", 0.2)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    eos = tokenizer.token_to_id("<|end_of_text|>")
    decoded = {}
    for split in ("train", "validation"):
        shard = read_megatron(tmp_path / "out" / split)
        assert shard.type_code == 8
        assert all(tokens[-1] == eos and eos not in tokens[:-1] for tokens in shard.documents)
        decoded[split] = [tokenizer.decode(tokens[:-1], skip_special_tokens=False) for tokens in shard.documents]
        facts = json.loads((tmp_path / "out" / f"{split}.json").read_text())
        assert facts["tokens"] == sum(map(len, shard.documents))
        assert facts["documents"] == len(shard.documents)
        assert facts["text_bytes"] == sum(len(text.encode()) for text in decoded[split])
        assert facts["vocab_size"] == 400 and facts["eos_id"] == eos
        assert facts["tokenizer"]["source_sha256"] == hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    assert sorted(decoded["train"] + decoded["validation"]) == sorted(documents)
    for split in decoded.values():  # input order is kept within a split
        assert split == [text for text in documents if text in set(split)]
    assert 0.1 < len(decoded["validation"]) / len(documents) < 0.3
    same = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert same.encode(documents[0]).ids == tokenizer.encode(documents[0]).ids


def test_paper_policy_cuts_each_document_after_its_bos_and_adds_no_eos(tmp_path, tokenizer_path, documents):
    corpus = write_jsonl(tmp_path / "corpus.json", documents)
    arguments = ("--policy", "paper", "--max-tokens", 32, "--validation-fraction", 0)
    prepare(tmp_path / "out", tokenizer_path, corpus, *arguments)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.enable_truncation(32)  # the library's own reading of "truncate to N": the BOS counts
    expected = [tokenizer.encode(text).ids for text in documents]
    assert any(len(tokens) == 32 for tokens in expected) and any(len(tokens) < 32 for tokens in expected)
    assert read_megatron(tmp_path / "out" / "train").documents == expected
    assert not (tmp_path / "out" / "validation.idx").exists()


def test_bytes_of_a_small_index_are_those_of_the_format(tmp_path, tokenizer_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", ["a", "bc"])
    prepare(tmp_path / "out", tokenizer_path, corpus, "--validation-fraction", 0)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    first, second = (len(tokenizer.encode(text, add_special_tokens=False).ids) + 1 for text in ("a", "bc"))
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<ii", first, second) + struct.pack("<qq", 0, 2 * first) + struct.pack("<qqq", 0, 1, 2)
    assert (tmp_path / "out" / "train.idx").read_bytes() == expected


def test_every_input_format_gives_the_same_tokens(tmp_path, tokenizer_path):
    documents = make_documents(40, seed=1)
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents)
    plain = "\n\n".join(documents).encode() + b"\n"
    inputs = {
        "a.jsonl": lines,
        "b.json.gz": gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]),  # two members
        "c.jsonl.zst": zstandard.compress(lines[:1000]) + zstandard.compress(lines[1000:]),  # two frames
        "d.txt": b"\xef\xbb\xbf" + plain,  # a byte order mark
        "e.txt.gz": gzip.compress(plain.replace(b"\n\n", b"\r\n \t\r\n\n")),
        "f.jsonl": lines.replace(b"\n", b"\r\n\n").rstrip(),  # blank lines, no newline at the end
    }
    paths = []
    for name, data in inputs.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(data)
    pq.write_table(pa.table({"id": range(40), "text": documents}), tmp_path / "g.parquet", row_group_size=7)
    paths.append(tmp_path / "g.parquet")
    (tmp_path / "h").mkdir()
    for number, text in enumerate(documents):
        (tmp_path / "h" / f"{number:03d}.txt").write_bytes(text.encode())

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    eos = tokenizer.token_to_id("<|end_of_text|>")
    expected = [tokenizer.encode(text, add_special_tokens=False).ids + [eos] for text in documents]
    prepare(tmp_path / "out", tokenizer_path, *paths, "--validation-fraction", 0)
    found = read_megatron(tmp_path / "out" / "train").documents
    assert len(found) == len(paths) * len(documents)
    for position, path in enumerate(paths):
        assert found[position * 40 : (position + 1) * 40] == expected, path.name
    arguments = ("--text-documents", "file", "--validation-fraction", 0)
    prepare(tmp_path / "files", tokenizer_path, tmp_path / "h", *arguments)
    assert read_megatron(tmp_path / "files" / "train").documents == expected


def test_neither_workers_nor_block_borders_change_the_output(tmp_path, tokenizer_path, documents):
    many = [f"{copy} {text}" for copy in range(30) for text in documents]  # several blocks of 1 MiB
    corpus = write_jsonl(tmp_path / "corpus.jsonl", many)
    assert corpus.stat().st_size > 3 << 20
    outputs = []
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        prepare(out, tokenizer_path, corpus, "--workers", workers, "--validation-fraction", 0.1)
        files = sorted(path for path in out.iterdir() if not path.name.startswith("."))
        outputs.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    assert len(outputs[0]) == 7
    assert outputs[0] == outputs[1]
    shards = [read_megatron(tmp_path / "out1" / split) for split in ("train", "validation")]
    assert sum(len(shard.documents) for shard in shards) == len(many)


def test_equal_documents_fall_on_the_same_side_and_the_seed_moves_them(tmp_path, tokenizer_path, documents):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", documents + documents[::-1])
    sides = []
    for seed in (1, 2):
        out = tmp_path / f"seed{seed}"
        prepare(out, tokenizer_path, corpus, "--validation-fraction", 0.3, "--seed", seed)
        split = [[tuple(d) for d in read_megatron(out / name).documents] for name in ("train", "validation")]
        assert not set(split[0]) & set(split[1])
        sides.append(split[1])
    assert sides[0] != sides[1]


def test_a_vocabulary_from_65500_on_takes_four_bytes_and_llmc_files_follow_both_versions(tmp_path, tokenizer_path):
    documents = make_documents(30, seed=2)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", documents)
    large = tmp_path / "large.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_tokens([f"<unused {n}>" for n in range(65500 - 400)])
    tokenizer.save(str(large))
    eos = tokenizer.token_to_id("<|end_of_text|>")
    expected = [tokenizer.encode(text, add_special_tokens=False).ids + [eos] for text in documents]
    stream = [token for tokens in expected for token in tokens]

    prepare(tmp_path / "wide", large, corpus, "--validation-fraction", 0)
    shard = read_megatron(tmp_path / "wide" / "train")
    assert shard.type_code == 4 and shard.documents == expected

    for path, magic, version, dtype in ((tokenizer_path, 20240520, 1, "<u2"), (large, 20240801, 7, "<u4")):
        out = tmp_path / f"llmc{version}"
        arguments = ("--format", "llmc", "--shard-tokens", 1000, "--validation-fraction", 0)
        prepare(out, path, corpus, *arguments)
        files = sorted(out.glob("train_*.bin"))
        assert [file.name for file in files] == [f"train_{n:06d}.bin" for n in range(-(-len(stream) // 1000))]
        tokens = []
        for file in files:
            data = file.read_bytes()
            header = struct.unpack_from("<256i", data)
            part = np.frombuffer(data, dtype, offset=1024).tolist()
            assert header[:3] == (magic, version, len(part)) and not any(header[3:])
            tokens += part
        assert tokens == stream


def test_a_document_cannot_spell_a_special_token(tmp_path, tokenizer_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", ["before <|end_of_text|> after"])
    prepare(tmp_path / "out", tokenizer_path, corpus, "--validation-fraction", 0)
    tokens = read_megatron(tmp_path / "out" / "train").documents[0]
    assert tokens.count(Tokenizer.from_file(str(tokenizer_path)).token_to_id("<|end_of_text|>")) == 1


def test_existing_shards_are_replaced_only_when_asked_and_then_wholly(tmp_path, tokenizer_path, documents):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", documents)
    out = tmp_path / "out"
    prepare(out, tokenizer_path, corpus, "--validation-fraction", 0.2)
    before = (out / "train.bin").read_bytes()
    refused = run_tool("prepare.py", corpus, "--tokenizer", tokenizer_path, "--out", out)
    assert refused.returncode == 2 and "--overwrite" in refused.stderr
    assert (out / "train.bin").read_bytes() == before
    prepare(out, tokenizer_path, corpus, "--validation-fraction", 0, "--overwrite")
    assert len(read_megatron(out / "train").documents) == len(documents)
    assert not list(out.glob("validation*")) and not list(out.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokenizer", "none.json"), "none.json"),
        (("--eos-token", "<nope>"), "no token <nope>"),
        (("none.jsonl",), "none.jsonl"),
        (("--seed", 2**63), "--seed"),
    ],
)
def test_arguments_are_refused_before_the_folder_is_made(tmp_path, tokenizer_path, arguments, message):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(3))
    out = tmp_path / "out"
    result = run_tool("prepare.py", "--tokenizer", tokenizer_path, "--out", out, corpus, *arguments)
    assert result.returncode in (2, 3) and message in result.stderr, result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", 0), "--workers 0"),
        (("--validation-fraction", 1.0), "--validation-fraction 1.0"),
        (("--eos-token", "<nope>"), "no token <nope>"),
        (("--text-key", "body"), "no key 'body'; there are 'url', 'text'"),
        (("--validation-fraction", 1e-9), "validation split"),
    ],
)
def test_impossible_options_are_refused_and_leave_nothing(tmp_path, tokenizer_path, arguments, message):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(3))
    out = tmp_path / "out"
    result = run_tool("prepare.py", corpus, "--tokenizer", tokenizer_path, "--out", out, *arguments)
    assert result.returncode in (2, 3) and message in result.stderr, result.stderr
    assert not [path for path in out.glob("*") if not path.name.startswith(".")]
