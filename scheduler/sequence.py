"""One attempt to run a request: its tokens, its blocks, and its progress through the sent steps."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from protos.kvcommon.eviction import Policy
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.request import AdmissionAttempt, Request, Tier

# A decoding sequence is low on blocks if they hold fewer than this many more tokens: some steps more than a sync takes.
SOON = 8
# Tokens of capacity that drafts leave free: one for each step that may be sent before the step with the drafts is
# answered. Otherwise, drafts could keep their sequence out of these steps.
_PLAIN_STEPS = 3
# A sequence asks for private blocks this many tokens before its first eviction: more than it decodes during a sync.
ASK_AHEAD = 32


class LeaveReason(enum.Enum):
    """Why a sequence leaves the running batch."""

    FINISHED = enum.auto()
    CANCELLED = enum.auto()
    PREEMPTED = enum.auto()
    # Cached blocks of the sequence do not come, or not in time, or another process lost the sequence's blocks.
    RESTARTED = enum.auto()

    @property
    def is_admitted_again(self) -> bool:
        """Whether the request is admitted again from its token ids."""
        return self in (LeaveReason.PREEMPTED, LeaveReason.RESTARTED)


@dataclass(slots=True)
class Progress:
    """The computed tokens of a sequence, and the ids sampled since the last report."""

    computed: int
    token_ids: array[int] = field(default_factory=partial(array, "I"))


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a block that the cache manager asks for; slots are counted from 1 in each tier."""

    ticket: int
    group: int
    source_slot: int
    target_slot: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE
    # Valid tokens of the block.
    num_tokens: int = 0

    @property
    def is_onload(self) -> bool:
        """Whether it copies a block from a lower tier to the device."""
        return self.source_tier != Tier.DEVICE == self.target_tier

    @property
    def is_within_device(self) -> bool:
        """Whether both slots are the device's."""
        return self.source_tier == Tier.DEVICE == self.target_tier


@dataclass(slots=True)
class Eviction:
    """Token eviction of one sequence, as of all sent steps unless a field says otherwise.

    message: the policy as the cache manager resolved it, for the executor. prompt: tokens of the request's prompt.
    private_blocks: slots that the sequence moves to with its first eviction; empty if it keeps its present slots,
    None until the cache manager has answered.
    """

    policy: Policy
    message: common.EvictionPolicy
    prompt: int
    private_blocks: list[int] | None = None
    requested: bool = False
    has_evicted: bool = False
    # From the first eviction until the step that announces it is sent.
    relocating: bool = False
    # Whether the cache manager has confirmed the move.
    relocation_synced: bool = False
    # With an adaptive window: the longest window that the cache manager grants, and the window that the attention
    # asked for last.
    granted_window: int = 0
    wanted_window: int | None = None
    # Whether a step determines the wanted window, whether the next step must announce a changed window, and whether the
    # cache manager has yet to answer.
    looking: bool = False
    window_unsent: bool = False
    window_unanswered: bool = False
    # Of the answered steps only: tokens evicted, and the most tokens that were kept at once.
    evicted: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        if self.policy.bounds is not None:
            self.granted_window = self.policy.bounds.least
            self.policy = self.policy.with_window(self.granted_window)

    @property
    def adapts(self) -> bool:
        """Whether its window is adaptive."""
        return self.policy.bounds is not None

    def wants_window(self, tokens: int) -> bool:
        """Takes the window that the attention asks for; returns whether to ask the cache manager for it now."""
        self.looking, self.wanted_window = False, tokens
        # While a window is taken back, or the manager has yet to answer, no window is asked for.
        may_ask = self.has_evicted and not self.window_unanswered and self.policy.window <= self.granted_window
        if not may_ask or tokens <= self.granted_window:
            return False
        self.window_unanswered = True
        return True

    def choose_window(self, *, is_due: bool) -> bool:
        """Chooses the window for the next eviction; returns False to wait for a step or for the cache manager.

        The choice never waits for blocks: without more blocks, the window stays. A window that is taken back becomes
        shorter at once. is_due: whether the policy evicts now.
        """
        if not is_due:
            if self.has_evicted and not self.window_unanswered and self.granted_window < self.policy.window:
                self._set_window(self.granted_window)
            return True
        if self.looking or self.window_unanswered or self.wanted_window is None:
            return False
        self._set_window(min(self.wanted_window, self.granted_window))
        return True

    def _set_window(self, tokens: int) -> None:
        before = self.policy.window
        if tokens == before:
            return
        self.policy = self.policy.with_window(tokens)
        self.window_unsent = True
        if tokens < before:
            # Blocks beyond the window are given back once no step uses them.
            self.granted_window, self.window_unanswered = tokens, True

    def evict(self, tokens: int, computed: int) -> None:
        """Counts the tokens that an answered step evicted before it computed. computed: tokens computed before it."""
        self.keep(computed)
        self.evicted += tokens

    def keep(self, computed: int) -> int:
        """Updates and returns the most tokens kept at once, now that `computed` tokens are computed."""
        self.most = max(self.most, computed - self.evicted)
        return self.most

    def bound(self, kept: int, planned: int) -> float:
        """Returns the number of planned tokens at which the policy decides again; infinite if it never does."""
        if self.kept_after(kept, planned) < kept:
            return planned
        more = self.policy.room(kept, planned, self.prompt)
        return math.inf if more is None else planned + more

    def kept_after(self, kept: int, planned: int) -> int:
        """Returns how many tokens stay when the sequence computes more."""
        return self.policy.kept_after(kept, planned, self.prompt)

    def needs_private_blocks(self, planned: int, last: int) -> bool:
        """Returns whether it is time to ask for private blocks. last: tokens computed when the request ends."""
        first = self.policy.first_eviction(self.prompt)
        if self.has_evicted or self.private_blocks is not None or first is None or first >= last:
            return False
        if self.adapts:
            return self.wanted_window is not None
        if planned < self.prompt and not self.policy.during_prefill:
            return False
        return planned + ASK_AHEAD >= first


# The fields of a sequence that the log shows when the step loop fails.
_DUMPED = (
    *("handle", "failures", "cached_tokens", "computed", "planned", "known", "evicted", "capacity", "limit"),
    *("sent_blocks", "started", "stopped", "leave_reason", "last_step", "trim_unanswered", "wait_for"),
)


@dataclass(slots=True, eq=False)
class Sequence:
    """Lengths, in tokens: computed (answered steps) <= planned (sent steps) <= capacity; planned < known <= limit.

    While steps with drafts are in flight, planned and known are upper bounds: as if every draft were accepted.

    Of the planned tokens, `evicted` have lost their slots; each of the others fills a slot of the block tables. With
    `capacity` planned tokens, the tables are full, or the eviction policy has to decide.

    `known` also counts sampled tokens in flight; `token_ids` holds only answered tokens. The step loop's thread owns
    every sequence from its admission on. Values that every step reads are stored, not computed.
    """

    attempt: AdmissionAttempt
    handle: int
    _: KW_ONLY
    cached_tokens: int
    # Slots per layer group.
    tables: list[list[int]]
    block_size: int
    # Handle of the sequence that still computes cached blocks of this sequence; 0 for none.
    wait_for: int = 0
    copies: tuple[Copy, ...] = ()
    # Until when it waits for its onloads, in seconds of the monotonic clock.
    onload_deadline: float = math.inf
    eviction: Eviction | None = None
    # Cached tokens that follow its own, for drafts.
    continuation: Seq[int] = ()

    request: Request = field(init=False)
    token_ids: array[int] = field(init=False)
    failures: int = field(init=False)
    computed: int = field(init=False)
    planned: int = field(init=False)
    known: int = field(init=False)
    # Number of known tokens from which on no step samples any more.
    limit: int = field(init=False)
    evicted: int = field(init=False, default=0)
    capacity: int = field(init=False, default=0)
    # With more planned tokens, the sequence runs out of blocks soon.
    low_capacity_at: float = field(init=False, default=0)
    # Tickets of onloads that have not ended: until they have, the sequence computes nothing.
    pending_onloads: set[int] = field(init=False)
    # The lowest tier that the next attempt may use.
    retry_tier: Tier = field(init=False, default=Tier.DISK)
    started: bool = field(init=False, default=False)
    stopped: bool = field(init=False, default=False)
    # Reported to the cache manager: computed tokens, and the length of `token_ids`.
    synced: int = field(init=False)
    synced_tokens: int = field(init=False)
    leave_reason: LeaveReason | None = field(init=False, default=None)
    last_step: int = field(init=False, default=0)
    # Time of the attempt's first token, in seconds of the monotonic clock; infinite before.
    first_token_at: float = field(init=False, default=math.inf)
    # Blocks per table that the executor has, and the planned tokens, including evicted tokens, for which these blocks
    # suffice. Only later blocks are spare.
    sent_blocks: int = field(init=False, default=0)
    sent_tokens: int = field(init=False, default=0)
    trim_unanswered: bool = field(init=False, default=False)
    # Drafted tokens that the executor considers worth computing in its next step.
    drafts: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.request = self.attempt.request
        self.failures = self.attempt.failures
        self.token_ids = self.attempt.token_ids[:]
        self.known = self.synced_tokens = len(self.token_ids)
        self.computed = self.planned = self.synced = self.cached_tokens
        self.limit = len(self.request.prompt_ids) + self.request.max_tokens
        self.pending_onloads = {copy.ticket for copy in self.copies if copy.is_onload}
        self._update_capacity()

    @property
    def remaining(self) -> int:
        """Known tokens that are not yet planned; always 1 for a sequence that decodes."""
        return self.known - self.planned

    def advance(self, count: int, step: int) -> bool:
        """Plans `count` more tokens in a step; returns whether that step samples."""
        assert 0 < count <= self.remaining
        assert self.planned + count <= self.capacity
        samples = count == self.remaining
        self.planned += count
        self.known += samples
        self.last_step = step
        return samples

    @property
    def most_drafts(self) -> int:
        """Most drafts that fit in a step that decodes the sequence; not positive if none fits."""
        left = min(self.capacity - self.planned, self.limit - self.known)
        return min(self.drafts, left - 1 - _PLAIN_STEPS)

    def send(self, blocks: int) -> None:
        """Notes that the executor has `blocks` blocks of every table."""
        self.sent_blocks = blocks
        self.sent_tokens = blocks * self.block_size + self.evicted

    def extend(self, group: int, slots: list[int]) -> None:
        """Appends slots to a layer group's table."""
        # Slots allocated before the cache manager knew of the move belong to the earlier table.
        if self.eviction is None or self.eviction.relocation_synced == self.eviction.has_evicted:
            self.tables[group] += slots
            self._update_capacity()

    def evict_tokens(self) -> bool:
        """Evicts as the policy says before more is planned; returns whether to ask for the sequence's private blocks.

        The executor evicts by the same rule before it computes the sequence's next tokens.
        """
        eviction = self.eviction
        assert eviction is not None
        kept = self.planned - self.evicted
        if self.known >= self.limit:
            return False
        if eviction.needs_private_blocks(self.planned, self.limit - 1):
            self._update_capacity()
            return True
        is_due = eviction.kept_after(kept, self.planned) < kept
        if eviction.adapts and not eviction.choose_window(is_due=is_due):
            return False
        left = eviction.kept_after(kept, self.planned)
        if is_due or left < kept:
            if not eviction.has_evicted:
                self._relocate(eviction)
            self.evicted += kept - left
            self.send(self.sent_blocks)
        if eviction.adapts and eviction.has_evicted:
            self._fit_table(eviction)
        self._update_capacity()
        return False

    def _fit_table(self, eviction: Eviction) -> None:
        """Cuts the table to the slots that the policy uses at most, or to those of a longer granted window."""
        most = eviction.policy.most_kept
        assert most is not None
        if eviction.adapts:
            most += max(0, eviction.granted_window - eviction.policy.window)
        del self.tables[0][-(-most // self.block_size) :]
        if self.sent_blocks > len(self.tables[0]):
            self.send(len(self.tables[0]))

    def _relocate(self, eviction: Eviction) -> None:
        """Moves to the private blocks, or to the first of the sequence's own blocks if these are private."""
        eviction.has_evicted = eviction.relocating = True
        if eviction.private_blocks:
            self.tables = [list(eviction.private_blocks)]
            self.sent_blocks = len(eviction.private_blocks)
        elif eviction.policy.most_kept is not None:
            self._fit_table(eviction)

    def align_to_score_window(self, count: int, most: int) -> int:
        """Returns the length of a chunk of about `count` tokens with all or none of the queries that a policy pools.

        Pooling these queries in parts changes the scores. The chunk is shortened to end before the first of these
        queries, or lengthened to have all, if these are at most `most` tokens.
        """
        if self.eviction is None or not self.eviction.policy.score_window:
            return count
        prompt = self.eviction.prompt
        first, end = prompt - self.eviction.policy.counted_rows(prompt), self.planned + count
        if self.planned < first < end < prompt:
            return first - self.planned
        return prompt - self.planned if self.planned == first and end < prompt <= self.planned + most else count

    def blocks_for(self, tokens: int) -> int:
        """Returns how many blocks hold the first `tokens` tokens, of which evicted tokens need no slot."""
        return -(-(tokens - self.evicted) // self.block_size)

    def first_spare_block(self) -> int:
        """Returns the index of the first block that is not at the executor, and not needed for the next two tokens."""
        return max(self.sent_blocks, self.blocks_for(self.known + 2))

    def trim(self) -> int:
        """Releases spare blocks; returns the capacity that is kept, in tokens."""
        keep = self.first_spare_block()
        for table in self.tables:
            del table[keep:]
        self._update_capacity()
        self.trim_unanswered = True
        return keep * self.block_size

    def take_progress(self) -> Progress:
        """Returns the progress since the last call."""
        start, self.synced, self.synced_tokens = self.synced_tokens, self.computed, len(self.token_ids)
        return Progress(self.computed, self.token_ids[start:])

    @property
    def shareable_tokens(self) -> int:
        """Leading tokens whose blocks stay valid after the sequence's release: none while an onload is pending."""
        return 0 if self.pending_onloads else self.computed

    def onloaded_tokens(self, tier: Tier) -> int:
        """Returns how many tokens its copies bring from a tier, for the layer group that gets the most."""
        tokens = [0] * len(self.tables)
        for copy in self.copies:
            if copy.source_tier == tier and copy.is_onload:
                tokens[copy.group] += copy.num_tokens
        return max(tokens)

    @property
    def is_suspect(self) -> bool:
        """Whether the executor may fail because of it: the executor failed more than once, and no token came since."""
        return self.failures > 1 and not self.has_new_tokens

    @property
    def has_new_tokens(self) -> bool:
        return len(self.token_ids) > len(self.attempt.token_ids)

    def dump(self) -> dict[str, Any]:
        """Returns the sequence's numbers, for a log."""
        numbers = {name: getattr(self, name) for name in _DUMPED}
        return numbers | {
            "attempt": self.attempt.number,
            "tokens": len(self.token_ids),
            "blocks": [len(table) for table in self.tables],
        }

    def next_attempt(self) -> AdmissionAttempt:
        """Returns the request with all its tokens so far, for another admission."""
        return AdmissionAttempt(
            self.request,
            self.token_ids,
            self.attempt.number + 1,
            lowest_tier=self.retry_tier,
            preempted=self.leave_reason is LeaveReason.PREEMPTED,
            failures=0 if self.has_new_tokens else self.failures,
        )

    def _update_capacity(self) -> None:
        capacity = min(map(len, self.tables)) * self.block_size + self.evicted
        self.low_capacity_at = capacity - SOON
        if self.eviction is not None:
            bound = self.eviction.bound(self.planned - self.evicted, self.planned)
            if bound <= capacity:
                capacity, self.low_capacity_at = int(bound), math.inf
        self.capacity = capacity
