"""A GGUF file's tokenizer gives the ids of the tokenizer that the file was made from."""

import functools
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from bench.gguf_file import write
from executor.errors import ModelError
from executor.models.files import ModelFiles, find, packaged_gguf
from executor.models.gguf.file import GgufFile
from executor.models.gguf.tokenizer import build_tokenizer
from executor.models.tokenizer import TokenizerFiles, load_tokenizer
from tests.stack import ROOT, model_cache

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ENDS = ["<|begin|>", "<|end|>"]
TEXTS = [
    "Hello, world! Don't I'LL we've",
    "  two spaces\n\n\tand tabs \r\n ends  ",
    "Pi is 3.14159, and 1234567 ends at 10 000; ٣٤٥ ½ Ⅷ",
    "naïve café, cafe\u0301, \u1e9b\u0323 größer, Ωμέγα, привет, 你好吗, こんにちは, 한국어, हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301\u0301 \u200b zero \ufeff",
    "def f(x):\n    return x ** 2  # 42\n",
    "<|begin|>user<|end|> <think> x </think>",
    "",
    " ",
    "x" * 300,
]
CORPUS = [path.read_text() for path in (ROOT / "docs/keys.md", ROOT / "docs/api.md")] + TEXTS


def split_of(name: str) -> pre_tokenizers.PreTokenizer:
    """As the tokenizers' publishers have it in tokenizer.json."""
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    if name in digits:
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + digits[name]
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
            ]
        )
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    return bytes_of


@functools.cache
def trained(name: str) -> Tokenizer:
    """A small tokenizer that splits text as those of that name do."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split_of(name)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, special_tokens=ENDS, show_progress=False),
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if name == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return tokenizer


def as_file(tokenizer: Tokenizer, path: Path, name: str, **changes: Any) -> ModelFiles:
    """A GGUF file with this tokenizer; changes: fields without their prefix, None takes one away."""
    said = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    types = [CONTROL if token in ENDS else USER_DEFINED if token == "<think>" else NORMAL for token in tokens]
    fields = {
        "model": "gpt2",
        "pre": name,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in said["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return file_of(path, {**fields, **changes})


def file_of(path: Path, fields: dict[str, Any]) -> ModelFiles:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
    norm = {"output_norm.weight": (np.ones(32, np.float32), "F32")}
    write(path, {"general.architecture": "llama", "tokenizer.chat_template": "{{ x }}", **metadata}, norm)
    return ModelFiles("m", str(path))


def of(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_str(files.json.decode())


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_bpe_of_bytes(name: str, tmp_path: Path) -> None:
    original = trained(name)
    files = load_tokenizer(as_file(original, tmp_path / "m.gguf", name))
    built = of(files)
    for text in CORPUS:
        for special in (True, False):
            expected = original.encode(text, add_special_tokens=special).ids
            assert built.encode(text, add_special_tokens=special).ids == expected
            assert built.decode(expected, skip_special_tokens=special) == original.decode(
                expected, skip_special_tokens=special
            )
    assert files.chat_template == "{{ x }}"
    assert files.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("given", [True, False, None])
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe"])
def test_a_text_begins_as_the_file_says(name: str, given: bool | None, tmp_path: Path) -> None:
    files = as_file(trained(name), tmp_path / "m.gguf", name, add_bos_token=given)
    wanted = name == "llama-bpe" if given is None else given
    assert (of(load_tokenizer(files)).encode("x").tokens[0] == "<|begin|>") == wanted


def test_an_end_that_the_file_asks_for(tmp_path: Path) -> None:
    files = as_file(trained("gpt-2"), tmp_path / "m.gguf", "gpt-2", add_eos_token=True)
    assert of(load_tokenizer(files)).encode("x").tokens == ["x", "<|end|>"]


@pytest.mark.model
def test_the_default_models_ids() -> None:
    """Also once converted. Transformers' reading of the file differs where a space stands before a digit."""
    built = build_tokenizer(GgufFile(packaged_gguf()))
    assert built is not None
    converted = of(load_tokenizer(find("", model_cache())))
    read: Any = AutoTokenizer.from_pretrained(packaged_gguf().parent, gguf_file=packaged_gguf().name)
    texts = [
        path.read_text() for folder in ("docs", "executor") for path in sorted((ROOT / folder).rglob("*.[mp][dy]"))
    ]
    for text in [*CORPUS, *texts]:
        ids = built.encode(text).ids
        assert converted.encode(text).ids == ids
        assert converted.decode(ids, skip_special_tokens=False) == text
        known = re.sub(r"\s+(?=\d)|[^\W\d_]*[^\x00-\x7f]\d*", ":", text)
        assert built.encode(known).ids == read.backend_tokenizer.encode(known).ids
    assert converted.encode("at   10").tokens == ["at", "ĠĠĠ", "1", "0"]


def pieces() -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece model: tokens, scores by rank, types."""
    words = [
        "▁the",
        "▁of",
        "in",
        "▁t",
        "he",
        "th",
        "er",
        "on",
        "re",
        "▁a",
        "▁w",
        "▁th",
        "ing",
        "▁▁",
        "an",
        "▁an",
        "▁and",
    ]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDE.,'"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters, "<tool>"]
    scores = (
        [0.0] * 259
        + [-float(rank) for rank in range(len(words))]
        + [-1e3 - rank for rank in range(len(letters))]
        + [0.0]
    )
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(words) + len(letters)), USER_DEFINED]
    return tokens, scores, types


def sentencepiece(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """Merges the neighbours whose whole has the best score, the leftmost of equal ones, until none have."""
    ids = {token: number for number, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if ids.get(a + b, 0) > 258]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [one for part in parts for one in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


SPM = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


@given(text=st.text(st.sampled_from("the of and inging  w.,'é你\n"), max_size=40))
def test_sentencepiece_merges_the_best_pair_first(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokens, scores, types = pieces()
    path = tmp_path_factory.getbasetemp() / "spm.gguf"
    if not path.exists():
        file_of(path, {**SPM, "tokens": tokens, "scores": scores, "token_type": types})
    built = of(load_tokenizer(ModelFiles("m", str(path))))
    assert built.encode(text, add_special_tokens=False).ids == sentencepiece(text, tokens, scores)
    assert built.encode(text).ids[0] == 1
    assert built.decode(built.encode(text).ids) == text


def test_sentencepiece_without_a_space_before_a_text(tmp_path: Path) -> None:
    tokens, scores, types = pieces()
    fields = {**SPM, "tokens": tokens, "scores": scores, "token_type": types, "add_space_prefix": False}
    built = of(load_tokenizer(file_of(tmp_path / "m.gguf", fields)))
    assert built.encode("the<tool>an", add_special_tokens=False).tokens == ["t", "he", "<tool>", "an"]
    assert built.decode(built.encode("  an").ids) == "  an"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"model": "t5"}, r"kind t5, and the executor serves gpt2"),
    "another split": ({"pre": "tekken"}, r"splits text as tekken.*serves gpt-2, smollm"),
    "no split": ({"pre": None}, r"has no tokenizer\.ggml\.pre"),
    "no tokens": ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
    "no merges": ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
    "a merge of nothing": ({"merges": ["qq zz"]}, r"a merge of 'qq' and 'zz' with no token"),
    "too few types": ({"token_type": [1, 1]}, r"tokens and 2 types"),
    "an end beyond the tokens": ({"eos_token_id": 100000}, r"eos_token_id 100000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_cannot_be_built_is_refused(case: str, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    files = as_file(trained("gpt-2"), tmp_path / "m.gguf", "gpt-2", **changes)
    with pytest.raises(ModelError, match=words):
        load_tokenizer(files)


def test_a_file_without_a_tokenizer_is_served_by_token_ids(tmp_path: Path) -> None:
    assert load_tokenizer(file_of(tmp_path / "m.gguf", {})) == TokenizerFiles()
