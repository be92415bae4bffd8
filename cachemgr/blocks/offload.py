"""Offloading: what happens to a block of a pool with lower tiers when its slot is wanted."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from cachemgr.blocks.block import Block
from cachemgr.blocks.eviction_queue import goes_before
from cachemgr.blocks.quota import Account, account_of
from cachemgr.blocks.tier import Tier
from cachemgr.retention.leases import offload_floor
from cachemgr.types import RemovalCause

if TYPE_CHECKING:
    from cachemgr.blocks.block import Writer
    from cachemgr.blocks.block_pool import BlockPool, PoolListener


class Eviction(enum.Enum):
    """How a block leaves its slot."""

    DROPPED = "dropped"
    OFFLOADED = "offloaded by a copy"
    ALREADY_BELOW = "offloaded to its backup"


# Looked up once, not for each block that goes.
_DROPPED, _OFFLOADED, _ALREADY_BELOW = Eviction


class CopyTicket(Protocol):
    """An open copy from one tier to a lower one, which has a reference to its target.

    `holds_source` says whether it has one to its source, too.
    """

    source: Block | None
    holds_source: bool

    @property
    def number(self) -> int: ...
    @property
    def target(self) -> Block: ...

    def offer(self) -> None:
        """The priority or the children of the target have changed: as long as the copy can be recalled, that counts."""


class Offloader:
    """Moves evictable blocks of a pool to the next lower tier, and tracks the copies in flight."""

    def __init__(self, pool: BlockPool, listener: PoolListener) -> None:
        self._pool = pool
        self._listener = listener
        # Blocks in lower tiers whose copies are in flight; no sequence may match them.
        self.offloading: dict[Block, CopyTicket] = {}
        # Blocks that are not computed yet, in slots whose former bytes are still to be copied.
        self.draining: dict[Block | None, CopyTicket] = {}

    def offload(self, tier: Tier, victim: Block, writer: Writer | None) -> Eviction:
        """Moves a block to the next tier with slots. If a copy is needed, the copy holds the block's reference."""
        pool, lower = self._pool, tier.below
        if lower is None:
            return _DROPPED
        # Its children in lower tiers are useless without it: it is offloaded whatever its priority.
        carries = pool.window is None and victim.children is not None
        account = account_of(victim)
        closed = lower.is_closed(account)
        if not carries and victim.priority < offload_floor(victim, pool.offload_min_priority):
            return _DROPPED
        if tier is pool.device:
            copied = None if closed else pool.backups.indexes.pop(victim, None)
            if copied is not None:
                self._lie_below(lower, victim, copied)
                return _ALREADY_BELOW
            # A backup in flight would come too late, and one that may not stay makes room.
            pool.backups.end(victim)
        moved: Block | None = None
        index = None if closed else self._empty_index(lower)
        if index is None:
            other = self._least(lower, account, writer)
            if other is None or not (carries or goes_before(other, victim)):
                return _DROPPED
            index = other.index
            if other in self.offloading:
                self._recall(lower, other, writer)
            elif pool.evict(lower, other, writer) is _OFFLOADED:
                moved = other
        tier.counters.offloaded += 1
        tier.counters.copied_bytes += pool.spec.block_bytes
        pool.report_removed(tier, victim)
        self._move(tier, victim, lower, index)
        lower.used += 1
        if account is not None:
            lower.count(account, blocks=1, used=1)
        if moved is not None:
            self.begin(moved, victim, writer)
        return _OFFLOADED

    def begin(self, moved: Block, occupant: Block, writer: Writer | None) -> None:
        """Opens the copy of a block that has moved; `occupant` has its old slot."""
        ticket = self._listener.offloading(self._pool, moved, occupant, writer)
        self.offloading[moved] = self.draining[occupant] = ticket
        # The record has the ticket for its generation.
        self._pool.report_stored(moved)

    def ended(self, ticket: CopyTicket) -> None:
        self.offloading.pop(ticket.target, None)
        if self.draining.get(ticket.source) is ticket:
            del self.draining[ticket.source]

    def drained(self, block: Block) -> None:
        """A block is computed: the former bytes of its slot are copied, confirmed or not.

        From now on its slot is free as soon as it has no references.
        """
        if self.draining:
            self.draining.pop(block, None)

    def reserve(self, block: Block) -> bool:
        """Reserves a block's slot for the copy of its former bytes. False if there is none."""
        if block not in self.draining:
            return False
        self.draining.pop(block).holds_source = True
        block.refs, block.scope = 1, None
        return True

    def offer(self, block: Block) -> None:
        """Updates the eviction order of blocks whose copies can be recalled, if the block is one."""
        ticket = self.offloading.get(block) if self.offloading else None
        if ticket is not None:
            ticket.offer()

    def demote(self, block: Block) -> bool:
        """Offloads an evictable device block now; the copy reserves its slot. False if it may not be offloaded."""
        pool, device, slot, account = self._pool, self._pool.device, block.index, account_of(block)
        device.delist(block, account)
        device.cached -= 1
        device.count(account, blocks=-1)
        block.refs = 1
        way = self.offload(device, block, None)
        if way is _DROPPED:
            block.refs = 0
            device.cached += 1
            device.count(account, blocks=1)
            device.enlist(block, account, newest=False)
        elif way is _ALREADY_BELOW:
            device.empty.append(slot)
        else:
            occupant = Block(slot)
            occupant.refs = 1
            pool.blocks[slot] = occupant
            device.used += 1
            self.begin(block, occupant, None)
            # Its slot is the copy's now.
            pool.release(occupant)
        return way is not _DROPPED

    def _empty_index(self, lower: Tier) -> int | None:
        """The index of an empty slot of a lower tier, or of a backup's slot."""
        if lower.empty or lower.unread:
            return lower.take_empty()
        backups = self._pool.backups
        return backups.pop_newest() if lower is backups.tier else None

    def _lie_below(self, lower: Tier, block: Block, index: int) -> None:
        """A device block moves to the slot of its backup, without a copy."""
        pool, account = self._pool, account_of(block)
        pool.device.counters.offloaded += 1
        pool.report_removed(pool.device, block)
        self._move(pool.device, block, lower, index)
        block.refs = 0
        lower.cached += 1
        lower.count(account, blocks=1)
        if pool.is_evictable(block):
            lower.enlist(block, account, newest=False)
        pool.report_stored(block)

    def _least(self, lower: Tier, account: Account | None, writer: Writer | None) -> Block | None:
        """The block that a lower tier evicts next: a cached one, or one whose copy can be recalled."""
        # At its ceiling an account replaces its own blocks only.
        shut = account is not None and lower.is_closed(account) and not lower.wants_own(account)
        least = None if shut else lower.victim(account) if lower.shares else lower.order.first()
        moving = None if writer is None else writer.opened.first(lower, account if shut else None)
        if moving is None or (least is not None and goes_before(least, moving)):
            return least
        return moving

    def _recall(self, lower: Tier, block: Block, writer: Writer | None) -> None:
        """Calls off the copy of a block and drops it."""
        assert writer is not None
        pool, ticket = self._pool, self.offloading.pop(block)
        del self.draining[ticket.source]
        self._listener.offload_recalled(ticket, writer)
        block.refs = 0
        lower.used -= 1
        lower.count(account_of(block), blocks=-1, used=-1)
        if pool.window is None and block.children is not None:
            pool.lose_children(block)
        pool.unlink(block, RemovalCause.EVICTED, writer)

    def _move(self, tier: Tier, block: Block, lower: Tier, index: int) -> None:
        """Moves a block to a slot of a lower tier; the caller fills the old slot."""
        pool, parent = self._pool, block.parent
        pool.blocks[block.index] = None
        block.index = index
        pool.blocks[index] = block
        tier.indexed -= 1
        lower.indexed += 1
        if pool.window is None:
            pool.count_children_in_tier(block)
            # The parent of a device block is on the device, too.
            if isinstance(parent, Block) and (tier is pool.device or pool.tier_of(parent) is tier):
                pool.child_left(parent, tier)
                if tier is pool.device:
                    # Its child below is useless without it.
                    pool.backups.enqueue(parent)
        pool.report_updated(block)
