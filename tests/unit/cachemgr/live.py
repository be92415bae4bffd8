"""What a simulated scheduler and device know of a sequence, and where the device's memory keeps it."""

from dataclasses import dataclass

from cachemgr.types import AdmitRequest, TierKind, Transfer
from protos.kvcache.eviction import Policy

BLOCK = 4
GARBAGE = ("garbage",)
Slot = int | tuple[TierKind, int]


@dataclass(eq=False)
class Live:
    """A sequence as its scheduler sees it."""

    request: AdmitRequest
    handle: int
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    copies: list[Transfer]
    wait_for: int = 0
    promised: int = 0
    started: bool = False
    reported_tokens: int = 0
    reported_computed: int = 0
    # What it computes is wrong because a copy failed; the manager must not let anybody find it.
    tainted: bool = False
    policy: Policy | None = None
    prompt: int = 0
    evicted: int = 0
    # Slots to move to; empty when it stays in its own.
    granted: list[int] | None = None
    moved: bool = False
    # Tokens computed before it moved, until that is reported.
    clean: int | None = None

    @property
    def has_news(self) -> bool:
        """Whether the manager has something to hear."""
        return (self.reported_computed, self.reported_tokens) != (self.computed, len(self.tokens))

    @property
    def kept(self) -> int:
        return self.computed - self.evicted

    @property
    def capacity(self) -> int:
        return min(len(table) for table in self.tables) * BLOCK

    def expected(self, position: int) -> tuple[object, ...]:
        """What K and V of a position are computed from; an image adds itself and the place in it."""
        meaning: list[object] = list(self.tokens[: position + 1])
        for start, length, digest in self.request.extra_keys:
            for at in range(start, min(start + length, position + 1)):
                meaning[at] = (meaning[at], digest, at - start)
        return (self.request.salt, self.request.adapter_id, *meaning)


def place(tier: TierKind, slot: int) -> Slot:
    """Where in the simulated memory a slot is."""
    return slot if tier is TierKind.DEVICE else (tier, slot)
