"""Offloading: what happens to a block of a pool with lower tiers when its slot is wanted."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from cachemgr.blocks.block import Block, Writer, account_of
from cachemgr.blocks.cache_scope import Account
from cachemgr.blocks.eviction_queue import goes_before
from cachemgr.blocks.tier import Tier
from cachemgr.blocks.write_through import Backups, CopyTicket, TieredPool
from cachemgr.retention.leases import offload_floor
from cachemgr.types import PoolSpec, RemovalCause


class Eviction(enum.Enum):
    """How a block leaves its slot."""

    DROPPED = "dropped"
    OFFLOADED = "offloaded by a copy"
    ALREADY_BELOW = "offloaded to its backup"


# Looked up once, not for each block that goes.
_DROPPED, _OFFLOADED, _ALREADY_BELOW = Eviction


class RecallableOffloads(Protocol):
    """Offloads that can still be called off."""

    def first(self, tier: Tier, account: Account | None) -> Block | None:
        """The block on its way to this tier that is evicted first, of one account or of all."""


class OffloadingWriter(Writer, Protocol):
    """A writer that other blocks are offloaded for."""

    @property
    def opened(self) -> RecallableOffloads:
        """Offloads for its blocks that no scheduler knows of yet."""


class OffloadingPool(TieredPool, Protocol):
    """The pool as its offloads see it."""

    @property
    def device(self) -> Tier: ...
    @property
    def spec(self) -> PoolSpec: ...
    def is_evictable(self, block: Block) -> bool: ...
    def evict(self, tier: Tier, victim: Block, writer: OffloadingWriter | None) -> Eviction: ...
    def release(self, block: Block) -> None: ...
    def unlink(self, block: Block, cause: RemovalCause, writer: Writer | None) -> None: ...
    def lose_children(self, block: Block) -> None: ...
    def count_children_in_tier(self, block: Block) -> None: ...
    def child_left(self, parent: Block, tier: Tier) -> None: ...
    def report_updated(self, block: Block) -> None: ...
    def report_removed(self, tier: Tier, block: Block) -> None: ...


class Offloader:
    """Moves evictable blocks of a pool to the next lower tier, and tracks the copies in flight."""

    def __init__(
        self,
        pool: OffloadingPool,
        backups: Backups,
        open_copy: Callable[[Block, Block, OffloadingWriter | None], CopyTicket],
        recall: Callable[[CopyTicket, OffloadingWriter], None],
    ) -> None:
        """`open_copy` and `recall` are `offloading` and `offload_recalled` of the pool's listener."""
        self._pool = pool
        self._backups = backups
        self._open_copy = open_copy
        self._recall_copy = recall
        # Blocks in lower tiers whose copies are in flight; no sequence may match them.
        self.offloading: dict[Block, CopyTicket] = {}
        # Blocks that are not computed yet, in slots whose former bytes are still to be copied.
        self.draining: dict[Block | None, CopyTicket] = {}

    def offload(self, tier: Tier, victim: Block, writer: OffloadingWriter | None) -> Eviction:
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
            copied = None if closed else self._backups.indexes.pop(victim, None)
            if copied is not None:
                self._lie_below(lower, victim, copied)
                return _ALREADY_BELOW
            # A backup in flight would come too late, and one that may not stay makes room.
            self._backups.end(victim)
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

    def begin(self, moved: Block, occupant: Block, writer: OffloadingWriter | None) -> None:
        """Opens the copy of a block that has moved; `occupant` has its old slot."""
        ticket = self._open_copy(moved, occupant, writer)
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
        return self._backups.pop_newest() if lower is self._backups.tier else None

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

    def _least(self, lower: Tier, account: Account | None, writer: OffloadingWriter | None) -> Block | None:
        """The block that a lower tier evicts next: a cached one, or one whose copy can be recalled."""
        # At its ceiling an account replaces its own blocks only.
        shut = account is not None and lower.is_closed(account) and not lower.wants_own(account)
        least = None if shut else lower.victim(account) if lower.shares else lower.order.first()
        moving = None if writer is None else writer.opened.first(lower, account if shut else None)
        if moving is None or (least is not None and goes_before(least, moving)):
            return least
        return moving

    def _recall(self, lower: Tier, block: Block, writer: OffloadingWriter | None) -> None:
        """Calls off the copy of a block and drops it."""
        assert writer is not None
        pool, ticket = self._pool, self.offloading.pop(block)
        del self.draining[ticket.source]
        self._recall_copy(ticket, writer)
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
                    self._backups.enqueue(parent)
        pool.report_updated(block)
