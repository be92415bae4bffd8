"""A small byte-level tokenizer, trained on the spot."""

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = 0
CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CORPUS = [
    "the cat sat on the mat and the dog",
    "Grüße aus Köln, naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 🎉 emoji",
    "x = y + 1\n",
]


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token, so that a character may span several tokens. A new copy, as tests add tokens."""
    return Tokenizer.from_str(_byte_level_json())


@functools.cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return str(tokenizer.to_str())


def printable_tokenizer() -> Tokenizer:
    """97 tokens: an end, a line break, and each printable character of ASCII."""
    characters = ["<eos>", "Ċ", "Ġ", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@functools.cache
def space_prefix_tokenizer() -> Tokenizer:
    """Words with a space in front, as in sentencepiece; the decoder strips the first space."""
    words = ["<unk>", "▁the", "▁cat", "▁sat", "s", "▁", "."]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
