"""One attempt to run a request: its tokens, blocks and how far the planned steps take it."""

import enum
import math
from dataclasses import dataclass

from scheduler.request import Candidate, Request


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


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer that must run before the sequence's first step."""

    ticket: int
    group: int
    source_slot: int
    target_slot: int


class Sequence:
    """Lengths, in tokens: computed (answered steps) <= planned (sent steps) <= capacity; planned < known.

    `known` counts sampled tokens in flight too; `token_ids` holds only those that came back. The step loop's thread
    owns every sequence from its admission on.
    """

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
    ) -> None:
        self.request: Request = candidate.request
        self.attempt = candidate.attempt
        self.handle = handle
        self.token_ids = list(candidate.token_ids)
        self.cached_tokens = cached_tokens
        self.computed = cached_tokens
        self.planned = cached_tokens
        self.sampled_ahead = 0
        self.tables = tables
        self.block_size = block_size
        self.wait_for = wait_for
        self.copies = copies
        self.started = False
        self.stopped = False
        self.exit: Exit | None = None
        self.last_step = 0
        # When this attempt had its first token, on the monotonic clock.
        self.streams_since = math.inf
        # Blocks per table that the executor has; only those behind them can be given back.
        self.sent_blocks = 0
        self.trim_unanswered = False

    @property
    def capacity(self) -> int:
        """Tokens that fit into the tables."""
        return min(len(table) for table in self.tables) * self.block_size

    @property
    def known(self) -> int:
        """Tokens known once all sent steps are answered."""
        return len(self.token_ids) + self.sampled_ahead

    @property
    def remaining(self) -> int:
        """Known tokens not yet planned; 1 means that the sequence decodes."""
        return self.known - self.planned

    @property
    def output_planned(self) -> int:
        """Output tokens once all sent steps are answered."""
        return self.known - len(self.request.prompt_ids)

    @property
    def exhausted(self) -> bool:
        """Whether the sent steps already bring all the tokens it may have."""
        return self.output_planned >= self.request.max_tokens

    def advance(self, count: int, step: int) -> bool:
        """Plans `count` more tokens in a step; returns whether that step samples."""
        assert 0 < count <= self.remaining
        assert self.planned + count <= self.capacity
        samples = count == self.remaining
        self.planned += count
        self.sampled_ahead += samples
        self.last_step = step
        return samples

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-tokens // self.block_size)

    def spare_blocks_from(self) -> int:
        """First block that is neither at the executor nor needed within two tokens."""
        return max(self.sent_blocks, self.blocks_for(self.known + 2))

    def trim(self) -> int:
        """Gives spare blocks back; returns the capacity that is kept, in tokens."""
        keep = self.spare_blocks_from()
        for table in self.tables:
            del table[keep:]
        self.trim_unanswered = True
        return keep * self.block_size

    def again(self) -> Candidate:
        """The request with all it has, as a fresh attempt."""
        return Candidate(self.request, tuple(self.token_ids), self.attempt + 1)
