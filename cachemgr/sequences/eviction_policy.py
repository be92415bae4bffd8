"""How sequences evict tokens: what was asked for, what an executor can carry, and how many blocks that takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachemgr.errors import RulePolicyError
from cachemgr.sequences.sequence import blocks_for
from protos.errors import InvalidField
from protos.kvcommon.eviction import Layout, Policy

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.retention.rules import Rule
    from cachemgr.sequences.clients import Executor
    from cachemgr.types import AdmitRequest

# A sync gives room for the next two steps.
_STEPS_AHEAD = 2


def resolve(request: AdmitRequest, rules: Iterable[Rule], executor: Executor) -> Policy | None:
    """How a new sequence evicts: as it says itself, else as the first of its rules that says anything.

    Raises InvalidField for the request's own policy, and RulePolicyError for a rule's that the model cannot carry.
    """
    windows = [pool.window for pool in executor.pools]
    layout = Layout(executor.block_size, windows, executor.spec.plain_rotary)
    if request.eviction_policy is not None:
        return request.eviction_policy.policy(layout, "eviction_policy")
    for rule in rules:
        wish = rule.spec.action.eviction_policy
        if wish is None:
            continue
        try:
            return wish.policy(layout, "eviction_policy")
        except InvalidField as error:
            name, where = rule.spec.name, executor.executor_id
            text = f"executor {where} cannot evict as rule {name} says: {error.message}"
            raise RulePolicyError(text, metadata={"rule": name}) from error
    return None


class Eviction:
    """How one sequence evicts, and how far it has come. Lengths in tokens.

    It fills the table that it was admitted with until its `first` eviction. For that it is granted another one,
    `private`, or none when it may stay in its own. Once it has moved, later evictions change no table.
    """

    __slots__ = ("evicted", "first", "granted", "moved", "policy", "private", "prompt", "settled", "slots")

    def __init__(self, policy: Policy, prompt: int, *, ahead: int) -> None:
        """`prompt`: tokens of the request's prompt. `ahead`: capacity ahead of need where a policy sets no bound."""
        self.policy = policy
        self.prompt = prompt
        self.first = policy.first_eviction(prompt)
        # Of the table that it moves to.
        self.slots = policy.most_kept or min(prompt, policy.maximum) + max(_STEPS_AHEAD, ahead)
        self.granted = False
        self.private: list[Block] = []
        self.moved = False
        # Tokens computed before it moved, and how many of them it dropped then.
        self.settled = 0
        self.evicted = 0

    def usable(self, slots: int) -> int:
        """Of so many slots, those that it may come to use before it moves, or behind that."""
        most = self.first
        if self.moved:
            most = None if self.policy.most_kept is None else self.slots
        return slots if most is None else min(slots, most)

    def slots_for(self, tokens: int) -> int:
        """Slots that it uses at most in its present table with so many known tokens."""
        return self.usable(tokens - self.evicted)

    def peak_blocks(self, tokens: int, block_size: int, *, no_store: bool) -> int:
        """Blocks that it has at once, at most, until it has so many tokens."""
        present = blocks_for(self.slots_for(tokens), block_size)
        if self.moved or self.first is None or tokens <= self.first:
            return present
        bounded = self.policy.most_kept is not None
        if no_store and bounded:
            return max(present, blocks_for(self.slots, block_size))
        later = 0 if bounded else tokens - self.dropped(self.first)
        # Both tables are there for a moment.
        return max(present + blocks_for(self.slots, block_size), blocks_for(later, block_size))

    def past_first(self, tokens: int) -> int:
        """So many tokens, or as many as lead it beyond its first eviction."""
        return tokens if self.first is None else max(tokens, self.first + 1)

    def dropped(self, computed: int) -> int:
        """Tokens that go at the first eviction, with so many computed."""
        return computed - self.policy.kept_after(computed, computed, self.prompt)
