"""Tokenizer files of both kinds, and the trained one."""

import base64
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
import tiktoken
import tokenizer_files
from conftest import make_documents, read_megatron, run_tool, write_jsonl
from errors import UsageError
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def ranks(tokenizer_path) -> dict[bytes, int]:
    """Merge ranks as in a tiktoken file, from a trained tokenizer's tokens in the order they were learnt."""
    byte_of = {character: byte for byte, character in tokenizer_files.byte_alphabet().items()}
    vocab = Tokenizer.from_file(str(tokenizer_path)).get_vocab(with_added_tokens=True)
    learnt = sorted((rank, token) for token, rank in vocab.items() if not token.startswith("<|"))
    found = {bytes(byte_of[c] for c in token): rank for rank, (_, token) in enumerate(learnt)}
    found[b"qzkw"] = len(found)  # no merge leads to it: only a piece that is exactly this token becomes it
    return found


def write_ranks(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


def test_a_llama3_file_encodes_as_tiktoken_does(tmp_path, ranks, documents):
    reference = tiktoken.Encoding(
        "reference", pat_str=tokenizer_files.LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={}
    )
    ours = tokenizer_files.load(write_ranks(tmp_path / "tokenizer.model", ranks))
    merged = 0
    for text in [
        *documents,
        "  \n\n\t x",
        "I'LL 1234567 don't\r\n\r\n",
        "日本語のテキスト",
        "qzkw xqzkw",
        "\x00\x7f\u200b",
        "a" * 300,
    ]:
        expected = reference.encode_ordinary(text)
        assert ours.tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.tokenizer.decode(expected) == text
        merged += len(text.encode()) - len(expected)
    assert merged > 1000
    assert ours.vocab_size == len(ranks) + 256
    assert ours.tokenizer.token_to_id("<|begin_of_text|>") == len(ranks)
    assert ours.tokenizer.token_to_id("<|end_of_text|>") == len(ranks) + 1


def test_special_tokens_of_a_llama3_file_have_the_published_ids(tmp_path, ranks):
    """Offsets of Llama 3.1: 128000 begin, 128001 end, 128006/7 headers, 128008 eom, 128009 eot, 128255 the last."""
    ours = tokenizer_files.load(write_ranks(tmp_path / "tokenizer.model", ranks)).tokenizer
    offsets = {
        "<|begin_of_text|>": 0,
        "<|end_of_text|>": 1,
        "<|finetune_right_pad_id|>": 4,
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "<|eom_id|>": 8,
        "<|eot_id|>": 9,
        "<|python_tag|>": 10,
        "<|reserved_special_token_247|>": 255,
    }
    assert {name: ours.token_to_id(name) - len(ranks) for name in offsets} == offsets


def test_prepare_takes_a_llama3_file(tmp_path, ranks):
    documents = make_documents(8)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", documents)
    model = write_ranks(tmp_path / "tokenizer.model", ranks)
    result = run_tool(
        "prepare.py", corpus, "--tokenizer", model, "--out", tmp_path / "out", "--policy", "paper",
        "--validation-fraction", 0,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    reference = tiktoken.Encoding(
        "reference", pat_str=tokenizer_files.LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={}
    )
    expected = [[len(ranks), *reference.encode_ordinary(text)] for text in documents]
    assert read_megatron(tmp_path / "out" / "train").documents == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not base64! x\n", "expected `base64 rank`"),
        (b"YQ== 0\nYg== 0\n", "rank 0 is given twice"),
        (b"YQ== 0\nYg== 2\n", "not a complete run from 0"),
        (b"YQ== 0\nYg== 1\n", "byte 0x00 is no token"),
        (b'{"model": 1}', "not a tokenizer.json"),
        (b"", "not a complete run"),
    ],
)
def test_damaged_tokenizer_files_are_refused(tmp_path, data, message):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        tokenizer_files.load(path)


def test_padding_and_truncation_of_a_file_do_not_reach_the_documents(tmp_path, tokenizer_path):
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer_files.load(tmp_path).tokenizer
    text = make_documents(1)[0] * 3
    plain = Tokenizer.from_file(str(tokenizer_path))
    assert loaded.encode(text).ids == plain.encode(text).ids


def test_special_tokens_are_named_by_flag_then_config_then_habit(tmp_path, tokenizer_path):
    file = tokenizer_files.load(tokenizer_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|end_of_text|>"}}))
    bos, eos = tokenizer_files.config_tokens(tmp_path / "tokenizer.json")
    assert (bos, eos) == ("<|end_of_text|>", None)
    assert file.special_id(None, bos, tokenizer_files.BOS_NAMES, "--bos-token") == 1
    assert file.special_id(None, None, tokenizer_files.BOS_NAMES, "--bos-token") == 0
    assert file.special_id("a", bos, tokenizer_files.BOS_NAMES, "--bos-token") == file.tokenizer.token_to_id("a")
    with pytest.raises(UsageError, match="--eos-token"):
        file.special_id("<x>", None, tokenizer_files.EOS_NAMES, "--eos-token")


def test_training_is_deterministic_and_every_text_survives(tmp_path):
    # Random syllables: many pairs are equally frequent, so an order left to chance would show.
    rng = random.Random(5)
    words = ["".join(rng.choices(["ca", "sa", "re", "lo", "mi", "tu"], k=rng.randint(1, 4))) for _ in range(4000)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [" ".join(words[n::40]) for n in range(40)])
    tools = str(pathlib.Path(tokenizer_files.__file__).parent)
    for name, threads in (("a.json", "1"), ("b.json", "4")):
        command = [sys.executable, "-c", "import train_tokenizer, sys; sys.exit(train_tokenizer.main())"]
        result = subprocess.run(
            [*command, str(corpus), "--vocab-size", "600", "--out", str(tmp_path / name)],
            env={**os.environ, "PYTHONPATH": tools, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    tokenizer = Tokenizer.from_file(str(tmp_path / "a.json"))
    assert tokenizer.get_vocab_size() == 600
    assert [tokenizer.id_to_token(i) for i in (0, 1)] == ["<|begin_of_text|>", "<|end_of_text|>"]
    unseen = "".join(map(chr, range(0x20, 0x3000, 7))) + "🙂\r\n\t\x00"
    ids = tokenizer.encode(unseen).ids
    assert ids[0] == 0 and tokenizer.decode(ids) == unseen
    few = run_tool("train_tokenizer.py", corpus, "--vocab-size", 100000, "--out", tmp_path / "c.json")
    assert few.returncode == 3 and "supports only" in few.stderr and not (tmp_path / "c.json").exists()
