"""Sequences under a policy of token eviction, run as the scheduler and the cache manager would run them."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from executor.models.forward import Model
from executor.step import BlockTableUpdate, Evicted, Step, StepOutput
from protos.kvcommon.eviction import AREAS, Kind, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.unit.executor.conftest import Driver
from tests.unit.executor.tiny_models import VOCAB

PROMPT = torch.randint(VOCAB, (37,), generator=torch.Generator().manual_seed(3)).tolist()
OUTPUT = 24


def small(kind: Kind, budget: int = 20) -> dict[str, Any]:
    """A policy of this kind that keeps about N = `budget` tokens."""
    fields: dict[str, Any] = {"kind": kind.value, "seed": 5}
    if kind is Kind.SLIDING_WINDOW:
        return fields | {"start_tokens": 2, "recent_tokens": budget - 2}
    if kind is Kind.ADAPTIVE_WINDOW:
        least = budget // 4 * 4 - 4
        bounds = {"recent_tokens": least, "max_cache_tokens": 4 + least + 12, "period_tokens": 4}
        return fields | {"start_tokens": 4} | bounds
    fields["max_cache_tokens"] = budget
    if kind is Kind.LAST:
        return fields
    if kind is Kind.SNAPKV:
        return fields | {"score_window_tokens": 4}
    if kind in AREAS:
        return fields | {"start_tokens": 4, "recent_tokens": 8}
    return fields | {"start_tokens": 1, "recent_tokens": 3, "period_tokens": 4}


VARIANTS: dict[str, dict[str, Any]] = {
    **{kind.name.lower(): small(kind) for kind in Kind if kind is not Kind.NONE},
    "kvcrush": small(Kind.NORM_SUM) | {"kvcrush": common.KvCrush(budget_blocks=2)},
    "all rows": small(Kind.NORM_SUM) | {"score_window_tokens": 0},
    "window alone": {"kind": Kind.SLIDING_WINDOW.value, "recent_tokens": 20},
    "window in periods": small(Kind.SLIDING_WINDOW) | {"period_tokens": 7},
    "batch-max": small(Kind.AVERAGE) | {"during_prefill": True, "start_tokens": 0, "recent_tokens": 0},
    "keys in the prompt": small(Kind.KEYDIFF) | {"during_prefill": True},
    "one by one": small(Kind.TOVA) | {"period_tokens": 1},
    "window that may not shrink": small(Kind.ADAPTIVE_WINDOW) | {"attention_mass": 1.0},
    "compacted adaptive window": small(Kind.ADAPTIVE_WINDOW) | {"positions": 2, "attention_mass": 0.9},
    "compacted window": small(Kind.SLIDING_WINDOW) | {"positions": 2, "period_tokens": 1},
    "compacted blocks": small(Kind.SUM) | {"positions": 2},
    "compacted heads": small(Kind.H2O) | {"positions": 2},
}


@dataclass
class EvictingSequence:
    """A sequence as the scheduler and the cache manager would run it; these grant every window that it asks for.

    wanted, windows: of an adaptive window, what the attention asked for last, and all windows that it had.
    """

    handle: int
    policy: Policy
    chunk: int = 9
    computed: int = 0
    kept: int = 0
    evicts: bool = False
    stays: bool = False
    evicted: int = 0
    wanted: int = 0
    windows: list[int] = field(default_factory=list)

    def next(self, driver: Driver, tokens: list[int]) -> dict[str, Any]:
        """The changes of the next step that are about it."""
        changes: dict[str, Any] = {}
        if not self.computed:
            changes["joining"] = replace(driver.new_sequence(self.handle, tokens, room=OUTPUT), policy=self.policy)
        left = self.policy.kept_after(self.kept, self.computed, len(tokens))
        is_due = left < self.kept
        if is_due and self.policy.bounds is not None:
            before = self.policy.window
            self.policy = self.policy.with_window(self.wanted)
            self.windows.append(self.wanted)
            left = self.policy.kept_after(self.kept, self.computed, len(tokens))
            if self.wanted != before:
                changes["window"] = self.wanted
            if self.wanted > before and self.evicts:
                slots = driver.blocks(self.wanted - before)[0]
                changes["table"] = BlockTableUpdate(self.handle, 0, slots)
        if is_due and not self.evicts:
            self.evicts = True
            most = self.policy.most_kept or self.policy.maximum + OUTPUT
            changes["evicting"] = () if self.stays else driver.blocks(most)[0]
        self.evicted += self.kept - left
        self.kept = left
        count = 1
        if self.computed < len(tokens):
            room = self.policy.room(self.kept, self.computed, len(tokens))
            count = min(self.chunk, len(tokens) - self.computed, self.chunk if room is None else room)
            changes["chunk"] = count
        self.kept += count
        self.computed += count
        changes["looks"] = self.policy.looks(self.kept, self.computed, len(tokens))
        return changes

    def step(self, driver: Driver, prompt: list[int] = PROMPT) -> StepOutput:
        """The next step of this sequence alone."""
        changes = self.next(driver, prompt)
        outcome = driver.step(**fields_of({self.handle: changes}))
        self.wanted = outcome.windows.get(self.handle, self.wanted)
        return outcome


def fields_of(changes: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The fields of a step with the changes of these sequences."""

    def of(name: str) -> dict[int, Any]:
        return {handle: each[name] for handle, each in changes.items() if name in each}

    return {
        "new_sequences": tuple(of("joining").values()),
        "chunks": of("chunk"),
        "table_updates": tuple(of("table").values()),
        "evicting": of("evicting"),
        "windows": of("window"),
        "looking": frozenset(handle for handle, looks in of("looks").items() if looks),
    }


def run(
    model: Model,
    prompts: dict[int, list[int]],
    policies: dict[int, Policy | None],
    output: int = OUTPUT,
    cache: torch.dtype = torch.float32,
    **fields: Any,
) -> Any:
    """`output` tokens of each sequence of one batch, by handle, and all evictions."""
    driver = Driver(model, num_blocks=400, cache=cache)
    by_handle = {handle: EvictingSequence(handle, policy, **fields) for handle, policy in policies.items() if policy}
    outputs: dict[int, list[int]] = {handle: [] for handle in prompts}
    evicted: list[Evicted] = []
    plain = {handle: len(tokens) for handle, tokens in prompts.items() if policies[handle] is None}
    step = 0
    while any(len(tokens) < output for tokens in outputs.values()):
        changes: dict[int, dict[str, Any]] = {}
        idle = set()
        for handle, tokens in prompts.items():
            if len(outputs[handle]) >= output:
                idle.add(handle)
            elif handle in by_handle:
                changes[handle] = by_handle[handle].next(driver, tokens)
            elif plain[handle]:
                changes[handle] = {"chunk": min(9, plain[handle])}
                if plain[handle] == len(tokens):
                    changes[handle]["joining"] = driver.new_sequence(handle, tokens, room=OUTPUT)
                plain[handle] -= changes[handle]["chunk"]
        step += 1
        outcome = driver.run(Step(step, idle=frozenset(idle), **fields_of(changes)))
        for handle, tokens_wanted in outcome.windows.items():
            by_handle[handle].wanted = tokens_wanted
        evicted += outcome.evicted
        for sampled in outcome.sampled:
            outputs[sampled.sequence].append(sampled.token_id)
    for sequence in by_handle.values():
        assert sequence.evicted == sum(one.tokens for one in evicted if one.sequence == sequence.handle)
    return outputs, evicted


def policy_of(model: Model, fields: dict[str, Any]) -> Policy:
    """The parsed policy of a message with these fields."""
    chosen = parse(common.EvictionPolicy(**fields), Driver(model, num_blocks=1).runner.layout)
    assert chosen is not None
    return chosen
