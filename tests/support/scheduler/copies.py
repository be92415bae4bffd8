"""Copies of blocks within the device, to it and from it."""

from scheduler.request import Tier
from scheduler.sequence import Copy
from tests.support.scheduler.sequences import BLOCK


def within(ticket: int, target: int = 101) -> Copy:
    """A copy within the device."""
    return Copy(ticket, 0, 5, target)


def up(ticket: int, target: int = 101, tier: Tier = Tier.HOST) -> Copy:
    """A block that is onloaded."""
    return Copy(ticket, 0, 7, target, tier, Tier.DEVICE, BLOCK)


def down(ticket: int, source: int = 101) -> Copy:
    """A block that is offloaded."""
    return Copy(ticket, 0, source, 9, Tier.DEVICE, Tier.HOST, BLOCK)
