"""How far a sequence has come in evicting tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.kvcommon.eviction import Policy

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block


# A sync allocates for the next two steps.
_STEPS_AHEAD = 2


class TokenEvictionState:
    """The policy of one sequence and its progress. Lengths in tokens.

    The sequence fills its admitted table until its `first` eviction. For that it is granted another table, `private`,
    or none when it may keep its own. After the first eviction no eviction changes a table.

    An adaptive window begins with its least length. More is granted with the first eviction or after it, for as long as
    the sequence keeps its window so long.
    """

    __slots__ = (
        *("committed", "evicted", "first", "granted", "has_begun", "is_taken_back"),
        *("policy", "private", "prompt", "slots"),
    )

    def __init__(self, policy: Policy, prompt: int, *, ahead: int) -> None:
        """`prompt`: tokens of the prompt. `ahead`: capacity ahead of need where a policy sets no bound."""
        self.policy = policy if policy.bounds is None else policy.with_window(policy.bounds.least)
        self.prompt = prompt
        self.first = policy.first_eviction(prompt)
        # Of the private table.
        self.slots = policy.most_kept or min(prompt, policy.maximum) + max(_STEPS_AHEAD, ahead)
        self.granted = False
        self.private: list[Block] = []
        self.has_begun = False
        # Whether the scheduler has been asked to shorten the adaptive window.
        self.is_taken_back = False
        # Tokens computed before the first eviction, and those of them that it dropped.
        self.committed = 0
        self.evicted = 0

    @property
    def window(self) -> int | None:
        """Tokens of the adaptive window that it has blocks for; None without one."""
        return None if self.policy.bounds is None else self.policy.window

    @property
    def granted_blocks(self) -> int:
        """Blocks beyond those of the least adaptive window."""
        policy = self.policy
        return 0 if policy.bounds is None else (policy.window - policy.bounds.least) // policy.block_size

    def set_window(self, tokens: int) -> None:
        """The adaptive window has another length; so have the private table or, once it has moved, its table."""
        self.policy = self.policy.with_window(tokens)
        self.is_taken_back = False
        assert self.policy.most_kept is not None
        self.slots = self.policy.most_kept

    def usable(self, slots: int) -> int:
        """How many of so many slots the sequence may use in its present table."""
        most = self.first
        if self.has_begun:
            most = None if self.policy.most_kept is None else self.slots
        return slots if most is None else min(slots, most)

    def slots_for(self, tokens: int) -> int:
        """Slots of the present table that so many known tokens use at most."""
        return self.usable(tokens - self.evicted)

    def peak_blocks(self, tokens: int, block_size: int, *, no_store: bool) -> int:
        """Blocks that the sequence has at once, at most, until it has so many tokens."""
        present = blocks_for(self.slots_for(tokens), block_size)
        if self.has_begun or self.first is None or tokens <= self.first:
            return present
        bounded = self.policy.most_kept is not None
        if no_store and bounded:
            return max(present, blocks_for(self.slots, block_size))
        later = 0 if bounded else tokens - self.dropped(self.first)
        # The sequence has both tables for a moment.
        return max(present + blocks_for(self.slots, block_size), blocks_for(later, block_size))

    def past_first(self, tokens: int) -> int:
        """So many tokens, but at least those beyond the first eviction."""
        return tokens if self.first is None else max(tokens, self.first + 1)

    def dropped(self, computed: int) -> int:
        """Tokens that the first eviction drops, with so many computed."""
        return computed - self.policy.kept_after(computed, computed, self.prompt)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)
