"""Loads a tokenizer file of either kind into a Hugging Face `tokenizers` Tokenizer.

- tokenizer.json, of any model;
- the Llama 3 "tiktoken" file (tokenizer.model): lines of `base64(token bytes) rank`. It is turned into an equivalent
  byte-level BPE, so that both kinds run through one fast path.
"""

import base64
import binascii
import hashlib
import json
import pathlib
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from errors import UsageError

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"

# How Llama 3 cuts text before merging: contractions, words, numbers of up to three digits, punctuation, white space.
LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The 256 special tokens follow the ranks; the names are those of Llama 3.1.
LLAMA3_NAMED_SPECIALS = (
    BEGIN_OF_TEXT, END_OF_TEXT, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
LLAMA3_SPECIAL_COUNT = 256

# Tried in this order when neither the command line nor tokenizer_config.json names the token.
BOS_NAMES = (BEGIN_OF_TEXT, "<s>", "<bos>", "<|endoftext|>")
EOS_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|endoftext|>")


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte: itself where it is printable."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(256 + len(alphabet) - len(printable))
    return alphabet


def byte_level_pipeline(tokenizer: Tokenizer, bos_id: int) -> None:
    """Llama 3's splitting, byte-level coding, and a BOS before each text when special tokens are asked for."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A",
        pair=f"{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT} $B",
        special_tokens=[(BEGIN_OF_TEXT, bos_id)],
    )


def read_tiktoken_ranks(path: pathlib.Path) -> list[bytes]:
    """The tokens in rank order. Refuses anything but one complete run of ranks from 0."""
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise UsageError(
                f"{path}:{number}: expected `base64 rank`, found {line[:60]!r}"
                " -> give a tokenizer.json or a Llama 3 tiktoken file"
            ) from None
        if rank in ranks or not token:
            raise UsageError(
                f"{path}:{number}: rank {rank} is given twice, or its token is empty -> the file is damaged"
            )
        ranks[rank] = token
    if not ranks or max(ranks) != len(ranks) - 1 or min(ranks) != 0:
        raise UsageError(f"{path}: {len(ranks)} ranks, not a complete run from 0 -> the file is damaged")
    return [ranks[rank] for rank in range(len(ranks))]


def from_tiktoken(path: pathlib.Path) -> Tokenizer:
    """A BPE that merges exactly as tiktoken does: any adjacent pair whose join is a token, lowest rank first."""
    tokens = read_tiktoken_ranks(path)
    alphabet = byte_alphabet()
    known = set(tokens)
    for byte in range(256):
        if bytes([byte]) not in known:
            raise UsageError(
                f"{path}: byte {byte:#04x} is no token, so some text could not be encoded -> the file is damaged"
            )
    text = {token: "".join(alphabet[byte] for byte in token) for token in tokens}
    vocab = {text[token]: rank for rank, token in enumerate(tokens)}
    merges = [
        (text[token[:cut]], text[token[cut:]])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    # A whole piece that is a token is taken as it is, merges or not: that is tiktoken's own shortcut.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    names = list(LLAMA3_NAMED_SPECIALS)
    names += [f"<|reserved_special_token_{i}|>" for i in range(3, 3 + LLAMA3_SPECIAL_COUNT - len(names))]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    byte_level_pipeline(tokenizer, tokenizer.token_to_id(BEGIN_OF_TEXT))
    return tokenizer


class TokenizerFile(NamedTuple):
    tokenizer: Tokenizer
    vocab_size: int  # the largest id + 1, so that ids index an embedding
    sha256: str  # of the file as given

    def special_id(self, name: str | None, config_value: str | None, candidates: tuple[str, ...], flag: str) -> int:
        for candidate in (name,) if name else (config_value, *candidates):
            if candidate and (found := self.tokenizer.token_to_id(candidate)) is not None:
                return found
        specials = sorted(
            token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special
        )
        tried = name or ", ".join(candidates)
        raise UsageError(
            f"the tokenizer has no token {tried}; its special tokens are {specials[:12]} -> name one with {flag}"
        )


def load(path: str | pathlib.Path) -> TokenizerFile:
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror} -> give --tokenizer a tokenizer.json or a Llama 3 tiktoken file"
        ) from None
    if data.lstrip()[:1] == b"{":
        try:
            tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception for every kind of fault
            raise UsageError(f"{path}: not a tokenizer.json that this `tokenizers` version reads: {error}") from None
        # Such settings of a fine-tuning file would cut or pad documents behind the policies' back.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    else:
        tokenizer = from_tiktoken(path)
    # A document that spells "<|end_of_text|>" must not be able to end itself.
    tokenizer.encode_special_tokens = True
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise UsageError(f"{path}: the vocabulary is empty")
    return TokenizerFile(tokenizer, max(vocab.values()) + 1, hashlib.sha256(data).hexdigest())


def config_tokens(path: str | pathlib.Path) -> tuple[str | None, str | None]:
    """(bos, eos) as named by a tokenizer_config.json beside the file, if there is one."""
    path = pathlib.Path(path)
    config_path = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
    if not config_path.is_file():
        return None, None
    try:
        config = json.loads(config_path.read_bytes())
    except ValueError as error:
        raise UsageError(
            f"{config_path}: {error} -> repair or remove it, and name tokens with --bos-token and --eos-token"
        ) from None

    def name(key: str) -> str | None:
        value = config.get(key)
        return value.get("content") if isinstance(value, dict) else value

    return name("bos_token"), name("eos_token")
