"""What the step loop knows of a sequence that evicts tokens: when it does, and where to."""

import math
from dataclasses import dataclass

from protos.kvcache.eviction import Policy

# Tokens before its first eviction with which a decoding sequence asks for blocks of its own: more than a sync takes.
ASK_AHEAD = 32


@dataclass(slots=True)
class Eviction:
    """Of one sequence, as it will be when the sent steps are answered, but for what says otherwise.

    prompt: tokens of the request's prompt. own: the blocks that it moves to when it first evicts, none of them when
    it stays where it is; None until the cache manager has given them.
    """

    policy: Policy
    prompt: int
    own: list[int] | None = None
    asked: bool = False
    evicts: bool = False
    # From its first eviction until the step is sent in which that happens.
    moving: bool = False
    # Whether the cache manager knows that it has moved.
    settled: bool = False
    # Of the answered steps only: tokens evicted, and the most that were kept at once.
    gone: int = 0
    most: int = 0

    def evict(self, tokens: int, computed: int) -> None:
        """An answered step evicted tokens before it computed more. computed: tokens computed until then."""
        self.keep(computed)
        self.gone += tokens

    def keep(self, computed: int) -> int:
        """Most tokens kept at once, now that so many are computed."""
        self.most = max(self.most, computed - self.gone)
        return self.most

    def bound(self, kept: int, planned: int) -> float:
        """Planned tokens with which the policy has to be asked again."""
        if self.leaves(kept, planned) < kept:
            return planned
        room = self.policy.room(kept, planned, self.prompt)
        return math.inf if room is None else planned + room

    def leaves(self, kept: int, planned: int) -> int:
        """Tokens that stay when the sequence computes more."""
        return self.policy.kept_after(kept, planned, self.prompt)

    def needs_own(self, planned: int, last: int) -> bool:
        """Whether it is time to ask for blocks of its own. last: tokens that are computed when the request ends."""
        first = self.policy.first_eviction(self.prompt)
        if self.evicts or self.own is not None or first is None or first >= last:
            return False
        if planned < self.prompt and not self.policy.during_prefill:
            return False
        return planned + ASK_AHEAD >= first
