"""The tokenizer of a GGUF file, with the same ids as the tokenizer that the file was made from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from executor.errors import ModelError
from executor.models.gguf.file import GgufFile

# llama.cpp's types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """Splits like Llama 3 and Qwen, which differ in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _words(r"\p{N}{1,3}")


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _words(r"\p{N}")


# How text is split before bytes are merged, by llama.cpp's names.
_SPLITS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}


def build_tokenizer(file: GgufFile) -> Tokenizer | None:
    """Returns a file's tokenizer, None if it has none. Raises ModelError for one that is damaged or not served."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"the GGUF file {file.path} has a tokenizer of the kind {kind}, and the executor serves gpt2 (BPE of "
            "bytes) and llama (SentencePiece)"
        )
    fields = _Vocabulary(file)
    tokenizer = _of_bytes(fields) if kind == "gpt2" else _of_pieces(fields)
    tokenizer.add_special_tokens([AddedToken(one, normalized=False, special=True) for one in fields.of(_CONTROL)])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in fields.of(_USER_DEFINED)])
    return tokenizer


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Returns the text of special tokens, by transformers' names."""
    fields = _Vocabulary(file)
    found = {name: fields.token(field) for name, field in _SPECIAL.items()}
    return {name: token for name, token in found.items() if token is not None}


def _of_bytes(fields: "_Vocabulary") -> Tokenizer:
    """Builds BPE of bytes, as in GPT-2."""
    split = fields.value("pre")
    if split not in _SPLITS:
        raise ModelError(
            f"the tokenizer of the GGUF file {fields.path} splits text as {split} (tokenizer.ggml.pre), and the "
            f"executor serves {', '.join(_SPLITS)}"
        )
    llama3 = _SPLITS[split] is _llama3
    merges = [tuple(merge.split(" ", 1)) for merge in fields.listed("merges")]
    tokenizer = Tokenizer(models.BPE(fields.ids, fields.fitting(merges), ignore_merges=llama3))
    if _SPLITS[split] is _qwen2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = fields.template(begins=llama3) or processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _of_pieces(fields: "_Vocabulary") -> Tokenizer:
    """Builds SentencePiece's BPE, which merges the pair with the best-scored result; other characters become bytes."""
    scores = fields.listed("scores")
    if len(scores) != len(fields.tokens):
        raise fields.damaged(f"{len(fields.tokens)} tokens and {len(scores)} scores")
    pairs = [
        (-score, token[:cut], token[cut:])
        for token, score, kind in zip(fields.tokens, scores, fields.types, strict=True)
        for cut in range(1, len(token) if kind == _NORMAL else 0)
        if token[:cut] in fields.ids and token[cut:] in fields.ids
    ]
    merges = [(left, right) for _, left, right in sorted(pairs, key=lambda pair: pair[0])]
    unknown = fields.token("unknown") or next(iter(fields.of(_UNKNOWN)), None)
    tokenizer = Tokenizer(models.BPE(fields.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaced = bool(fields.value("add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if spaced else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    if (template := fields.template(begins=True)) is not None:
        tokenizer.post_processor = template
    return tokenizer


class _Vocabulary:
    """The fields of a tokenizer. Raises ModelError if they are missing or do not fit each other."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._metadata = file.metadata
        self.tokens: list[str] = self.listed("tokens")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.types: list[int] = self.listed("token_type", [1] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise self.damaged(f"{len(self.tokens)} tokens and {len(self.types)} types of tokens")

    def listed(self, name: str, otherwise: Any = None) -> Any:
        value = self.value(name, otherwise)
        if not isinstance(value, list):
            raise self.damaged(f"a field {name} that is no list")
        return value

    def value(self, name: str, otherwise: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}", otherwise)
        if value is None:
            raise ModelError(f"the GGUF file {self.path} has no tokenizer.ggml.{name} in its metadata")
        return value

    def of(self, kind: int) -> Sequence[str]:
        return [token for token, one in zip(self.tokens, self.types, strict=True) if one == kind]

    def token(self, name: str) -> str | None:
        """Returns the text of the token that a field names; None if there is no such field."""
        number = self.value(f"{name}_token_id", -1)
        if number == -1:
            return None
        if type(number) is not int or not 0 <= number < len(self.tokens):
            raise self.damaged(f"{name}_token_id {number!r}, and {len(self.tokens)} tokens")
        return self.tokens[number]

    def fitting(self, merges: list[tuple[str, ...]]) -> list[tuple[str, str]]:
        """Returns merges as the library takes them."""
        pairs = [(merge[0], merge[-1]) for merge in merges]
        for left, right in pairs:
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self.damaged(f"a merge of {left!r} and {right!r} with no token for it")
        return pairs

    def template(self, *, begins: bool) -> processors.PostProcessor | None:
        """Returns what adds the tokens around a text that the file asks for; None if the file asks for none.

        begins: whether the token that begins a text is added by default.
        """
        around = {
            name: self.token(name)
            for name, given in (("bos", begins), ("eos", False))
            if self.value(f"add_{name}_token", given)
        }
        tokens = {name: token for name, token in around.items() if token is not None}
        if not tokens:
            return None
        order = [tokens.get("bos"), "$A", tokens.get("eos")]
        single = [part for part in order if part is not None]
        pairs = [(token, self.ids[token]) for token in tokens.values()]
        return processors.TemplateProcessing(single=single, special_tokens=pairs)

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"the tokenizer of the GGUF file {self.path} has {what}: the file is damaged")
