"""The workloads of the speed benchmarks: token ids of real prose, the same for every system that is compared.

| case | requests, all at once | prompt tokens | output tokens each |
| --- | --- | --- | --- |
| W1 throughput | 32 | uniform in 32..512, 9,288 in all | 64 |
| W2 shared prefix, with and without reuse | 32 | 1,024 in common and 32..64 of their own, 34,279 in all | 32 |
| W3 long decode | 4 | 256 each | 1,024 |
| W4 single stream | 1 | 128 | 128 |

Decoding is greedy, the end of sequence is ignored. A variant has the same lengths and different text, so that no prefix
cache knows it; variant 0 is for warming up and for checking the output.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer


def _lengths(seed: int, count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Uniform lengths from random(), whose results Python keeps the same for a seed."""
    rng = random.Random(seed)
    return tuple(shortest + int(rng.random() * (longest - shortest + 1)) for _ in range(count))


@dataclass(frozen=True)
class Case:
    """One workload: in each prompt, `own` tokens follow `shared` tokens that all prompts begin with."""

    name: str
    title: str
    own: tuple[int, ...]
    output_tokens: int
    shared: int = 0
    reuse: bool = True

    @property
    def requests(self) -> int:
        """How many requests arrive at once."""
        return len(self.own)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Length of every prompt."""
        return tuple(self.shared + own for own in self.own)

    @property
    def workload(self) -> str:
        """The part of the name that cases with the same prompts have in common."""
        return self.name.partition("-")[0]


# Seeds whose lengths have the sums in the table above.
_W1, _W2 = _lengths(1477, 32, 32, 512), _lengths(382, 32, 32, 64)
CASES = (
    Case("W1", "throughput", _W1, 64),
    Case("W2-off", "shared prefix, reuse off", _W2, 32, shared=1024, reuse=False),
    Case("W2-on", "shared prefix, reuse on", _W2, 32, shared=1024),
    Case("W3", "long decode", (256,) * 4, 1024),
    Case("W4", "single stream", (128,), 128),
)


def chosen(names: Iterable[str]) -> list[Case]:
    """The cases with these names, in the usual order; "W2" is both of its cases. Raises ValueError for others."""
    names = list(names)
    known = {name for case in CASES for name in (case.name, case.workload)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no workload {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [case for case in CASES if case.name in names or case.workload in names]


class Corpus:
    """Tokens of English technical prose that comes with every Python: the language reference."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.tokens = encode("\n\n".join(text for _, text in sorted(topics.items())))

    @classmethod
    def of(cls, model: Path) -> Corpus:
        """The corpus in the tokens of the model in a folder."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        return cls(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def prompts(self, case: Case, variant: int) -> list[list[int]]:
        """Token ids of every request, the same for all cases of a workload."""
        rng = random.Random(f"{case.workload} {variant}")
        common = self._piece(rng, case.shared)
        return [common + self._piece(rng, length) for length in case.own]

    def _piece(self, rng: random.Random, length: int) -> list[int]:
        begin = int(rng.random() * (len(self.tokens) - length))
        return self.tokens[begin : begin + length]
