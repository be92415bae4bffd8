"""One attempt to run a request: its tokens, blocks and how far the planned steps take it."""

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from scheduler.cache.tier_costs import Tier
from scheduler.core.token_eviction import Eviction
from scheduler.request import Candidate, Request

# Tokens of room with which a decoding sequence is said to run out of it soon: a few steps more than a sync takes.
SOON = 8


class Exit(enum.Enum):
    """Why a sequence leaves the running set."""

    FINISHED = enum.auto()
    CANCELLED = enum.auto()
    PREEMPTED = enum.auto()
    # Its promised prefix will not come, or the other side lost its blocks.
    RESTARTED = enum.auto()

    @property
    def comes_back(self) -> bool:
        """Whether the request is admitted again from its ids."""
        return self in (Exit.PREEMPTED, Exit.RESTARTED)


@dataclass(slots=True)
class Progress:
    """What one sequence has computed and generated since the last report."""

    computed: int
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer of the cache manager's; slots are counted from 1 in each tier."""

    ticket: int
    group: int
    source_slot: int
    target_slot: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE
    # Tokens of the block that matter.
    num_tokens: int = 0

    @property
    def onboards(self) -> bool:
        """Whether it brings a block from a lower tier to the device."""
        return self.source_tier != Tier.DEVICE == self.target_tier

    @property
    def is_within_device(self) -> bool:
        """Whether no lower tier has to do with it."""
        return self.source_tier == Tier.DEVICE == self.target_tier


# Of a sequence, what a log shows when the step loop fails.
_DUMPED = (
    *("handle", "attempt", "failures", "cached_tokens", "computed", "planned", "known", "evicted", "capacity"),
    *("limit", "sent_blocks", "started", "stopped", "exit", "last_step", "trim_unanswered", "wait_for"),
)


class Sequence:
    """Lengths, in tokens: computed (answered steps) <= planned (sent steps) <= capacity; planned < known <= limit.

    Of the planned tokens, `evicted` have no slots any more; the others fill as many slots of its tables. Capacity says
    with how many planned tokens the tables are full, or the sequence has to evict.

    `known` counts sampled tokens in flight too; `token_ids` holds only those that came back. The step loop's thread
    owns every sequence from its admission on. What it looks at in every step is kept, not computed.
    """

    __slots__ = (
        "arriving",
        "attempt",
        "block_size",
        "cached_tokens",
        "capacity",
        "computed",
        "copies",
        "evicted",
        "eviction",
        "exit",
        "failures",
        "handle",
        "known",
        "known_before",
        "last_step",
        "limit",
        "onboard_by",
        "planned",
        "request",
        "retry_tier",
        "sent_blocks",
        "sent_tokens",
        "started",
        "stopped",
        "streams_since",
        "tables",
        "tight_at",
        "token_ids",
        "told",
        "told_tokens",
        "trim_unanswered",
        "wait_for",
    )

    def __init__(
        self,
        candidate: Candidate,
        handle: int,
        *,
        cached_tokens: int,
        tables: list[list[int]],
        block_size: int,
        wait_for: int = 0,
        copies: tuple[Copy, ...] = (),
        onboard_by: float = math.inf,
        eviction: Eviction | None = None,
    ) -> None:
        self.request: Request = candidate.request
        self.attempt = candidate.attempt
        self.failures = candidate.failures
        self.handle = handle
        self.token_ids = list(candidate.token_ids)
        self.cached_tokens = cached_tokens
        self.computed = cached_tokens
        self.planned = cached_tokens
        self.known = self.known_before = len(self.token_ids)
        # With so many known tokens, the sent steps bring all the output that it may have.
        self.limit = len(self.request.prompt_ids) + self.request.max_tokens
        self.tables = tables
        self.block_size = block_size
        self.eviction = eviction
        self.evicted = 0
        self.capacity = 0
        # With more planned tokens, it needs more capacity soon.
        self.tight_at: float = 0
        self._measure()
        self.wait_for = wait_for
        self.copies = copies
        # Tickets of those that bring blocks from lower tiers and have not ended: before that it computes nothing.
        self.arriving = {copy.ticket for copy in copies if copy.onboards}
        # How long that is waited for, on the monotonic clock, and the lowest tier that another attempt may use.
        self.onboard_by = onboard_by
        self.retry_tier = Tier.DISK
        self.started = False
        self.stopped = False
        # What the cache manager has been told: computed tokens, and how many of the ids.
        self.told = cached_tokens
        self.told_tokens = len(self.token_ids)
        self.exit: Exit | None = None
        self.last_step = 0
        # When this attempt had its first token, on the monotonic clock.
        self.streams_since = math.inf
        # Blocks per table that the executor has, and the tokens that fit into them; only what lies behind them can be
        # given back.
        self.sent_blocks = 0
        self.sent_tokens = 0
        self.trim_unanswered = False

    @property
    def remaining(self) -> int:
        """Known tokens not yet planned; 1 means that the sequence decodes."""
        return self.known - self.planned

    @property
    def output_planned(self) -> int:
        """Output tokens once all sent steps are answered."""
        return self.known - len(self.request.prompt_ids)

    def advance(self, count: int, step: int) -> bool:
        """Plans `count` more tokens in a step; returns whether that step samples."""
        assert 0 < count <= self.remaining
        assert self.planned + count <= self.capacity
        samples = count == self.remaining
        self.planned += count
        self.known += samples
        self.last_step = step
        return samples

    def send(self, blocks: int) -> None:
        """The executor has so many blocks of every table."""
        self.sent_blocks = blocks
        self.sent_tokens = blocks * self.block_size + self.evicted

    def extend(self, group: int, slots: list[int]) -> None:
        """Appends blocks to a table."""
        # What was given before the manager knew of the move belongs to the table that is gone.
        if self.eviction is None or self.eviction.settled == self.eviction.evicts:
            self.tables[group] += slots
            self._measure()

    def make_room(self) -> bool:
        """Evicts what the policy says before more is planned; whether that waits for blocks of its own.

        The executor does the same by the same rule before it computes the sequence's next tokens.
        """
        eviction = self.eviction
        assert eviction is not None
        kept = self.planned - self.evicted
        if self.known >= self.limit:
            return False
        if eviction.needs_own(self.planned, self.limit - 1):
            return True
        left = eviction.leaves(kept, self.planned)
        if left < kept:
            if not eviction.evicts:
                self._move(eviction)
            self.evicted += kept - left
            self.send(self.sent_blocks)
        self._measure()
        return False

    def _move(self, eviction: Eviction) -> None:
        """Into the blocks of its own, or into the first ones of those that it has, when these are."""
        eviction.evicts = eviction.moving = True
        most = eviction.policy.most_kept
        if eviction.own:
            self.tables = [list(eviction.own)]
            self.sent_blocks = len(eviction.own)
        elif most is not None:
            del self.tables[0][-(-most // self.block_size) :]
            self.sent_blocks = min(self.sent_blocks, len(self.tables[0]))

    def whole_window(self, count: int) -> int:
        """So many tokens, or fewer: the queries at a prompt's end that its policy counts are computed in one step.

        Their attention is pooled together, and where others leave room must not decide what that makes of it.
        """
        if self.eviction is None or not self.eviction.policy.score_window:
            return count
        prompt = self.eviction.prompt
        first = prompt - self.eviction.policy.counted_rows(prompt)
        return first - self.planned if self.planned < first < self.planned + count < prompt else count

    def asks_first(self) -> bool:
        """Whether nobody has asked for blocks of its own yet; now somebody has."""
        assert self.eviction is not None
        asked, self.eviction.asked = self.eviction.asked, True
        return not asked

    def own_blocks_given(self, slots: list[int]) -> None:
        """The blocks that it moves to when it first evicts."""
        if self.eviction is not None and self.eviction.own is None:
            self.eviction.own = slots

    def own_blocks_settled(self) -> None:
        """The cache manager has heard of the move."""
        assert self.eviction is not None
        self.eviction.settled = True

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold that many tokens, but for those evicted."""
        return -(-(tokens - self.evicted) // self.block_size)

    def spare_blocks_from(self) -> int:
        """First block that is neither at the executor nor needed within two tokens."""
        return max(self.sent_blocks, self.blocks_for(self.known + 2))

    def trim(self) -> int:
        """Gives spare blocks back; returns the capacity that is kept, in tokens."""
        keep = self.spare_blocks_from()
        for table in self.tables:
            del table[keep:]
        self._measure()
        self.trim_unanswered = True
        return keep * self.block_size

    def progress(self) -> Progress:
        """What is new since the last call."""
        told, self.told, self.told_tokens = self.told_tokens, self.computed, len(self.token_ids)
        return Progress(self.computed, self.token_ids[told:])

    @property
    def reliable(self) -> int:
        """Leading tokens that others may build on once it is gone: none where a block of them has not come."""
        return 0 if self.arriving else self.computed

    def onboarded_tokens(self, tier: Tier) -> int:
        """Tokens that its copies bring from a tier, in the layer group that gets most."""
        tokens = [0] * len(self.tables)
        for copy in self.copies:
            if copy.source_tier == tier and copy.onboards:
                tokens[copy.group] += copy.num_tokens
        return max(tokens)

    @property
    def is_suspect(self) -> bool:
        """Whether the executor may fail because of it: it did so more than once, and has brought no token since."""
        return self.failures > 1 and not self.has_gained

    @property
    def has_gained(self) -> bool:
        """Whether this attempt has brought a token."""
        return len(self.token_ids) > self.known_before

    def dump(self) -> dict[str, Any]:
        """Its numbers, for a log."""
        numbers = {name: getattr(self, name) for name in _DUMPED}
        return numbers | {"tokens": len(self.token_ids), "blocks": [len(table) for table in self.tables]}

    def again(self) -> Candidate:
        """The request with all it has, as a fresh attempt."""
        return Candidate(
            self.request,
            tuple(self.token_ids),
            self.attempt + 1,
            lowest_tier=self.retry_tier,
            preempted=self.exit is Exit.PREEMPTED,
            failures=0 if self.has_gained else self.failures,
        )

    def _measure(self) -> None:
        capacity = min(map(len, self.tables)) * self.block_size + self.evicted
        self.tight_at = capacity - SOON
        if self.eviction is not None:
            bound = self.eviction.bound(self.planned - self.evicted, self.planned)
            if bound <= capacity:
                capacity, self.tight_at = int(bound), math.inf
        self.capacity = capacity
