"""Quality and memory of the adaptive window and of fixed windows, for sequences that reach far back and for others.

Sequences that reach far back are asked for a key in their prompt and then continue; the others continue a text. All
windows keep the same first tokens, and evict the same number at a time. Memory is the slots in use during generation.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import tensor

from bench.research.eviction import passkey
from bench.research.eviction.cache import BLOCK_SIZE, Cache
from bench.tables import table
from executor.batch import SequenceState
from protos.kvcommon.eviction import Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common

PROMPT = 1280
FOLLOWING = 256
ANSWERED = 32
START = 64
LEAST, MOST = 128, 1024
MASSES = (0.96, 0.97, 0.98)
WINDOWS = (128, 256, 384, 512, 768, 1024)
DEPTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def fixed(window: int, layout: Layout) -> Policy:
    """A window of fixed length."""
    message = common.EvictionPolicy(
        kind=common.EVICTION_KIND_SLIDING_WINDOW,
        start_tokens=START,
        recent_tokens=window,
        period_tokens=BLOCK_SIZE,
    )
    made = parse(message, layout)
    assert made is not None
    return made


def adaptive(mass: float, layout: Layout) -> Policy:
    """An adaptive window that gets every length that it asks for."""
    message = common.EvictionPolicy(
        kind=common.EVICTION_KIND_ADAPTIVE_WINDOW,
        start_tokens=START,
        recent_tokens=LEAST,
        max_cache_tokens=START + MOST,
        attention_mass=mass,
    )
    made = parse(message, layout)
    assert made is not None
    return made


def policies(layout: Layout) -> dict[str, Policy]:
    """All policies that are compared, by name."""
    return {
        **{f"adaptive, {mass}": adaptive(mass, layout) for mass in MASSES},
        **{f"fixed, {window}": fixed(window, layout) for window in WINDOWS},
    }


@dataclass
class Course:
    """A sequence after its prompt, under a policy that gets every window it asks for. slots: in use at each token."""

    cache: Cache
    sequence: SequenceState
    prompt: int
    slots: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    wanted: int | None = None

    def compute(self, tokens: Sequence[int]) -> Any:
        """Computes n tokens without asking the policy in between; returns [n, V] logits."""
        engine, sequence = self.cache.engine, self.sequence
        counted = engine.scored([sequence], [len(tokens)])
        first = sequence.kept
        computed = self.cache.compute(sequence, tokens, counted)
        engine.observe([sequence], [len(tokens)], [computed.attention] if computed.attention else [])
        self.slots += range(first + 1, first + len(tokens) + 1)
        self.windows += [0 if sequence.policy is None else sequence.policy.window] * len(tokens)
        if sequence.policy is not None and sequence.policy.looks(sequence.kept, sequence.computed, self.prompt):
            self.wanted = int(engine.wanted_window(sequence))
        return computed.logits

    def room(self) -> int:
        """Evicts if an eviction is due; returns how many tokens may be computed next."""
        sequence = self.sequence
        policy = sequence.policy
        if policy is None:
            return FOLLOWING
        if policy.kept_after(sequence.kept, sequence.computed, self.prompt) < sequence.kept:
            if self.wanted is not None:
                self.cache.set_window(sequence, self.wanted)
            self.cache.evict(sequence, ())
        assert sequence.policy is not None
        return sequence.policy.room(sequence.kept, sequence.computed, self.prompt) or 1


def course(cache: Cache, policy: Policy | None) -> Course:
    """A sequence after the prompt that was prefilled last."""
    sequence = cache.whole_prompt() if policy is None else cache.evicted(policy)
    return Course(cache, sequence, sequence.computed)


def continued(cache: Cache, policy: Policy | None, following: Sequence[int]) -> tuple[Course, float]:
    """The course over the tokens after the prompt, and their mean negative log likelihood without the first token."""
    one, losses, at = course(cache, policy), list[float](), 0
    while at < len(following) - 1:
        count = min(one.room(), len(following) - 1 - at)
        logits = one.compute(following[at : at + count])
        losses += F.cross_entropy(logits, tensor(following[at + 1 : at + count + 1]), reduction="none").tolist()
        at += count
    return one, statistics.mean(losses)


def answered(cache: Cache, policy: Policy | None, first: int) -> tuple[Course, list[int]]:
    """The course and the greedy tokens after the prompt. first: the first token, which is already known."""
    one, tokens = course(cache, policy), [first]
    while len(tokens) < ANSWERED:
        one.room()
        tokens.append(int(one.compute(tokens[-1:])[0].argmax()))
    return one, tokens


def measure(cache: Cache, tokenizer: Any, texts: Sequence[Sequence[int]], keys: int) -> Iterator[dict[str, Any]]:
    """Yields one record per sequence and policy, for `keys` prompts of each depth and for each continued text."""
    chosen: dict[str, Policy | None] = {"full cache": None, **policies(cache.layout)}
    for text in texts:
        cache.prefill(text[:PROMPT])
        for name, policy in chosen.items():
            one, loss = continued(cache, policy, text[PROMPT : PROMPT + FOLLOWING])
            yield _record(one, name, "near") | {"nll": loss}
    source = random.Random(3)
    for depth, _ in itertools.product(DEPTHS, range(keys)):
        key = str(source.randrange(10 ** (passkey.DIGITS - 1), 10**passkey.DIGITS))
        first = cache.prefill(passkey.prompt(tokenizer, PROMPT, depth, key))
        for name, policy in chosen.items():
            one, tokens = answered(cache, policy, first)
            said = tokenizer.decode(tokens[: passkey.ANSWER_TOKENS])
            yield _record(one, name, "far") | {"depth": depth, "right": key in said}


def _record(one: Course, name: str, kind: str) -> dict[str, Any]:
    lengths = {"first_window": one.windows[0], "last_window": one.windows[-1]}
    return {"policy": name, "kind": kind, "slots": statistics.mean(one.slots), **lengths}


def means(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record for each policy and kind of sequence, with the means."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["policy"], record["kind"]), []).append(record)
    return [
        {"policy": policy, "kind": kind}
        | {
            figure: statistics.mean(record[figure] for record in group)
            for figure in ("slots", "first_window", "last_window", "nll", "right")
            if figure in group[0]
        }
        for (policy, kind), group in groups.items()
    ]


class Report:
    """The records by policy and kind of sequence."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._records = records
        self.names = list(dict.fromkeys(record["policy"] for record in records))
        self.adaptive = [name for name in self.names if name.startswith("adaptive")]
        self.fixed = [name for name in self.names if name.startswith("fixed")]

    def mean(self, name: str, kind: str, figure: str) -> float:
        """The mean of all sequences of a kind; for "mixed" the mean of both kinds, each counting half."""
        if kind == "mixed":
            return statistics.mean(self.mean(name, one, figure) for one in ("near", "far"))
        return statistics.mean(r[figure] for r in self._records if (r["policy"], r["kind"]) == (name, kind))

    def perplexity(self, name: str) -> float:
        """The perplexity of the continued texts, relative to the full cache."""
        return math.exp(self.mean(name, "near", "nll") - self.mean("full cache", "near", "nll"))

    def found(self, name: str) -> float:
        """Share of the keys that were found."""
        return self.mean(name, "far", "right")

    def at_equal_memory(self, slots: float, kind: str, figure: str) -> float:
        """The result of a fixed window with this mean number of slots, interpolated between the two nearest windows."""
        points = sorted((self.mean(name, kind, "slots"), self._figure(name, figure)) for name in self.fixed)
        for (low, before), (high, after) in itertools.pairwise(points):
            if low <= slots <= high:
                return before + (after - before) * (slots - low) / (high - low)
        return points[0][1] if slots < points[0][0] else points[-1][1]

    def _figure(self, name: str, figure: str) -> float:
        return self.found(name) if figure == "found" else self.perplexity(name)

    def text(self) -> str:
        """Shows every policy, and each adaptive window beside a fixed window with the same mean number of slots."""
        every = [
            [
                name,
                *(f"{self.mean(name, kind, 'slots'):.0f}" for kind in ("near", "far", "mixed")),
                f"{self.perplexity(name):.3f}",
                f"{100 * self.found(name):.0f}",
            ]
            for name in self.names
        ]
        header = ["windows", "slots\nnear", "slots\nfar", "slots\nmixed", "perplexity\nnear", "keys found, %\nfar"]
        beside = []
        for name, kind in itertools.product(self.adaptive, ("near", "far", "mixed")):
            slots = self.mean(name, kind, "slots")
            row = [f"{name}, {kind}", f"{slots:.0f}"]
            for figure, shown in (("perplexity", kind != "far"), ("found", kind != "near")):
                pair = self._figure(name, figure), self.at_equal_memory(slots, kind, figure)
                form = (lambda value: f"{100 * value:.0f}") if figure == "found" else (lambda value: f"{value:.3f}")
                row += [form(value) if shown else "" for value in pair]
            beside.append(row)
        equal = ["at equal mean memory", "slots", "perplexity\nadaptive", "\nfixed", "keys, %\nadaptive", "\nfixed"]
        return f"{table(header, every)}\n\n{table(equal, beside)}"
