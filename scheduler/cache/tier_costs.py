"""Which tiers deliver a block sooner than the device computes it."""

from scheduler.bridge import CopySpeed
from scheduler.request import Tier

# A tier that was too slow is tried again if no copy has been measured for this long.
RETRY_SECONDS = 30.0


class TierCosts:
    """Compares the time to copy a block from each tier with the time to compute its tokens. Pure: no clock."""

    def __init__(self, block_size: int) -> None:
        """block_size: in tokens."""
        self._block_size = block_size
        self._prompt_token: float | None = None
        # Seconds per block, and the time of their last change.
        self._blocks: dict[Tier, tuple[float, float]] = {}

    def observe(self, speed: CopySpeed, now: float) -> None:
        """Takes the times of ended copies, at `now` in seconds of the monotonic clock."""
        self._prompt_token = speed.prompt_token or self._prompt_token
        for tier, seconds in ((Tier.HOST, speed.host_block), (Tier.DISK, speed.disk_block)):
            # An average that has not moved is no new measurement.
            if seconds is not None and seconds != self._blocks.get(tier, (None,))[0]:
                self._blocks[tier] = seconds, now

    def lowest_tier(self, now: float) -> Tier:
        """Returns the lowest tier that delivers blocks faster than they are computed; an unmeasured tier is tried."""
        if self._is_slow(Tier.HOST, now):
            return Tier.DEVICE
        return Tier.HOST if self._is_slow(Tier.DISK, now) else Tier.DISK

    def _is_slow(self, tier: Tier, now: float) -> bool:
        if self._prompt_token is None or tier not in self._blocks:
            return False
        seconds, since = self._blocks[tier]
        return seconds > self._prompt_token * self._block_size and now < since + RETRY_SECONDS
