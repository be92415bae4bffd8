"""Tiers of the cache, and which of them give blocks back sooner than they are computed."""

import enum
from typing import NamedTuple

# A tier that was too slow is tried again when nothing was heard of it for so long.
RETRY_SECONDS = 30.0


class Tier(enum.IntEnum):
    """Where a block's bytes live; the numbers are those of both protocols."""

    DEVICE = 1
    HOST = 2
    DISK = 3


class Speed(NamedTuple):
    """What was measured of late, in seconds: a block's way to the device, and a prompt token. None: not known."""

    host_block: float | None = None
    disk_block: float | None = None
    prompt_token: float | None = None


class Rates:
    """Compares what a block takes from each tier with what its tokens take to compute. Pure: it is told the time."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prompt_token: float | None = None
        # Seconds per block, and since when they have been what they are.
        self._blocks: dict[Tier, tuple[float, float]] = {}

    def observe(self, speed: Speed, now: float) -> None:
        """Copies have ended."""
        self._prompt_token = speed.prompt_token or self._prompt_token
        for tier, seconds in ((Tier.HOST, speed.host_block), (Tier.DISK, speed.disk_block)):
            # An average that has not moved says nothing new.
            if seconds is not None and seconds != self._blocks.get(tier, (None,))[0]:
                self._blocks[tier] = seconds, now

    def lowest_tier(self, now: float) -> Tier:
        """The lowest tier down to which blocks come sooner than they are computed; what is not known is worth a try."""
        if self._is_slow(Tier.HOST, now):
            return Tier.DEVICE
        return Tier.HOST if self._is_slow(Tier.DISK, now) else Tier.DISK

    def _is_slow(self, tier: Tier, now: float) -> bool:
        if self._prompt_token is None or tier not in self._blocks:
            return False
        seconds, since = self._blocks[tier]
        return seconds > self._prompt_token * self._block_size and now < since + RETRY_SECONDS
