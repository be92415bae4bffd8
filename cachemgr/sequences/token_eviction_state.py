"""The progress of a sequence in evicting tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.kvcommon.eviction import Policy

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block


# A sync allocates for the next two steps.
_STEPS_AHEAD = 2


class TokenEvictionState:
    """The policy of one sequence and its progress. Lengths in tokens.

    The sequence fills its admitted table until its `first` eviction, at `first` tokens. For this eviction, it is
    granted a second table, `private`, unless it may keep its own. Later evictions change no table.

    An adaptive window begins with its minimum length. A longer window is granted with the first eviction or later,
    until the scheduler shortens the window again.
    """

    __slots__ = (
        *("committed", "evicted", "first", "granted", "has_begun", "is_taken_back"),
        *("policy", "private", "prompt", "slots"),
    )

    def __init__(self, policy: Policy, prompt: int, *, ahead: int) -> None:
        """`prompt`: tokens of the prompt. `ahead`: capacity ahead of need if the policy sets no limit."""
        self.policy = policy if policy.bounds is None else policy.with_window(policy.bounds.least)
        self.prompt = prompt
        self.first = policy.first_eviction(prompt)
        # Slots of the private table.
        self.slots = policy.most_kept or min(prompt, policy.maximum) + max(_STEPS_AHEAD, ahead)
        self.granted = False
        self.private: list[Block] = []
        self.has_begun = False
        # Whether the scheduler has been asked to shorten the adaptive window.
        self.is_taken_back = False
        # Tokens computed before the first eviction, and how many of them the eviction dropped.
        self.committed = 0
        self.evicted = 0

    @property
    def window(self) -> int | None:
        """Length in tokens of the adaptive window that has blocks; None without an adaptive window."""
        return None if self.policy.bounds is None else self.policy.window

    @property
    def granted_blocks(self) -> int:
        """Blocks beyond the blocks of the minimum adaptive window."""
        policy = self.policy
        return 0 if policy.bounds is None else (policy.window - policy.bounds.least) // policy.block_size

    def set_window(self, tokens: int) -> None:
        """Changes the length of the adaptive window, and the slots of the private table or, after the move, the table.

        The caller allocates or frees the blocks.
        """
        self.policy = self.policy.with_window(tokens)
        self.is_taken_back = False
        assert self.policy.most_kept is not None
        self.slots = self.policy.most_kept

    def usable(self, slots: int) -> int:
        """How many of N = `slots` slots the sequence may use in its present table."""
        most = self.first
        if self.has_begun:
            most = None if self.policy.most_kept is None else self.slots
        return slots if most is None else min(slots, most)

    def slots_for(self, tokens: int) -> int:
        """Slots of the present table that N = `tokens` known tokens use at most."""
        return self.usable(tokens - self.evicted)

    def peak_blocks(self, tokens: int, block_size: int, *, no_store: bool) -> int:
        """The maximum number of blocks at once, until the sequence has N = `tokens` tokens."""
        present = blocks_for(self.slots_for(tokens), block_size)
        if self.has_begun or self.first is None or tokens <= self.first:
            return present
        bounded = self.policy.most_kept is not None
        if no_store and bounded:
            return max(present, blocks_for(self.slots, block_size))
        later = 0 if bounded else tokens - self.dropped(self.first)
        # For a moment, the sequence has both tables.
        return max(present + blocks_for(self.slots, block_size), blocks_for(later, block_size))

    def past_first(self, tokens: int) -> int:
        """Returns `tokens`, or the first length beyond the first eviction if that is larger."""
        return tokens if self.first is None else max(tokens, self.first + 1)

    def dropped(self, computed: int) -> int:
        """Tokens that the first eviction drops after N = `computed` tokens."""
        return computed - self.policy.kept_after(computed, computed, self.prompt)


def blocks_for(tokens: int, block_size: int) -> int:
    """Number of blocks that hold N = `tokens` tokens."""
    return -(-tokens // block_size)
