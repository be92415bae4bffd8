"""Evicts a block from its tier: the block moves to a lower tier, or is dropped.

`TierAccounts.victim` chooses the block, in the order of `EvictionQueue`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from cachemgr.blocks.block import Block, Writer, account_of
from cachemgr.types import RemovalCause

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.blocks.tier import Tier


class Eviction(enum.Enum):
    """How a block leaves its slot."""

    DROPPED = "dropped"
    OFFLOADED = "offloaded by a copy"
    ALREADY_BELOW = "offloaded to its write-through copy"


# Looked up once, not for each evicted block.
_DROPPED = Eviction.DROPPED


def evict(pool: BlockPool, tier: Tier, victim: Block, writer: Writer | None) -> Eviction:
    """Offloads or drops an evictable block; the caller gets the slot. writer: the sequence that needs the slot."""
    accounts = tier.accounts
    if accounts.shares:
        owner = account_of(victim)
        accounts.delist(victim, owner)
        accounts.count(owner, blocks=-1)
    else:
        accounts.order.remove(victim)
    tier.cached -= 1
    # The mean is sampled: only every eighth slot counts.
    if victim.index & 7 == 1:
        tier.counters.note_idle_before_eviction(pool.idle_seconds(victim))
    if tier.below is not None:
        way = pool.offloader.offload(tier, victim, writer)
        if way is not _DROPPED:
            return way
    if pool.window is None and victim.children is not None:
        pool.lose_children(victim)
    pool.unlink(victim, RemovalCause.EVICTED, writer)
    return _DROPPED
