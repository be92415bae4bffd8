"""Whether the model can still repeat a number from a long prompt after the eviction."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from bench.research.eviction.cache import Cache
from bench.research.eviction.policies import FULL, policy

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = (512, 1024, 1792)
DIGITS = 5
# Each digit is a token; a few more tokens may stand before the digits.
ANSWER_TOKENS = 8
_TASK = "There is a pass key hidden in the following text. Find it and remember it.\n\n"
_NEEDLE = " The pass key is the number {key}. Remember it. The pass key is the number {key}. "
_QUESTION = "\n\nWhat is the pass key?"
_ANSWER = "The pass key is the number"
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def prompt(tokenizer: Any, length: int, depth: float, key: str) -> list[int]:
    """Exactly `length` tokens of a chat: the key at relative position `depth` in the filler, then the question.

    Raises ValueError when `length` is too short for the words around the filler.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    mark = "<<>>"
    chat = [{"role": "user", "content": _TASK + mark + _QUESTION}]
    before, after = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).split(mark)
    parts = ids(before), ids(_NEEDLE.format(key=key)), ids(after + _ANSWER)
    left = length - sum(map(len, parts))
    if left < 0:
        raise ValueError(f"{length} tokens are too few: the words around the filler take {length - left}")
    filler = ids(_FILLER * (1 + left // 20))
    place = int(depth * left)
    return [*parts[0], *filler[:place], *parts[1], *filler[place:left], *parts[2]]


def answer(cache: Cache, first: int, name: str, budget: int) -> list[int]:
    """Greedy tokens: the first from the whole prompt, all others from the tokens that a policy keeps."""
    sequence = cache.whole_prompt() if name == FULL else cache.evicted(policy(name, budget, cache.layout))
    tokens = [first]
    while len(tokens) < ANSWER_TOKENS:
        tokens.append(int(cache.compute(sequence, tokens[-1:]).logits[0].argmax()))
    return tokens


def measure(
    cache: Cache, tokenizer: Any, policies: Sequence[str], budgets: Sequence[int], keys: int
) -> Iterator[dict[str, Any]]:
    """Yields one record per answer; `keys` prompts of each length and depth."""
    source = random.Random(1)
    for length, depth, _ in itertools.product(LENGTHS, DEPTHS, range(keys)):
        key = str(source.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        first = cache.prefill(prompt(tokenizer, length, depth, key))
        for name, budget in [(FULL, 0), *itertools.product(policies, budgets)]:
            said = tokenizer.decode(answer(cache, first, name, budget))
            record = {"policy": name, "budget": budget, "length": length, "depth": depth}
            yield record | {"key": key, "said": said, "right": key in said}
