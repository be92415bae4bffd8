"""How a pool makes room: what goes down a tier, and what is lost."""

from __future__ import annotations

import enum
from collections.abc import Callable

from cachemgr.blocks.block import Block
from cachemgr.blocks.eviction_history import UseTimes
from cachemgr.blocks.radix_tree import PrefixIndex
from cachemgr.blocks.tier import Account, Tier, account_of, goes_before
from cachemgr.retention.leases import offload_floor
from cachemgr.sequences.sequence import Sequence
from cachemgr.types import EventKind, RemovalCause

# Looked up once, not for each block that goes.
_EVICTED, _UPDATED = RemovalCause.EVICTED, EventKind.UPDATED


class Way(enum.Enum):
    """How a block leaves its place."""

    OUT = "of the index"
    BY_COPY = "down, by a copy"
    IN_BACKUP = "down, to where a copy of it lies already"


_OUT, _BY_COPY, _IN_BACKUP = Way


class MakingRoom(PrefixIndex):
    """A part of a pool: what it does when slots are wanted."""

    offload_min_priority: int
    use_times: UseTimes
    on_moved: Callable[[Block, Block, Sequence | None], None] | None
    on_recalled: Callable[[Block, Sequence], None] | None

    def drop(self, block: Block) -> None:
        """Takes a reference back."""
        raise NotImplementedError

    def _vacate(self, tier: Tier, victim: Block, writer: Sequence | None) -> Way:
        """Takes an evictable block from its place: down a tier, or out of the cache."""
        if tier.shares:
            owner = account_of(victim)
            tier.delist(victim, owner)
            tier.count(owner, blocks=-1)
        else:
            tier.order.remove(victim)
        tier.cached -= 1
        # A mean needs no more than every eighth slot.
        if victim.slot & 7 == 1:
            tier.counters.note_reuse_gap(self._leases.now - self.use_times.at(victim.recency))
        if self._has_lower:
            # Nothing may enter it into an order while its children move.
            victim.refs = 1
            way = self._move_down(tier, victim, writer)
            if way is not _OUT:
                return way
            victim.refs = 0
        if self.window is None and victim.children is not None:
            self._lose_children(victim)
        self._unlink(victim, _EVICTED, writer)
        return _OUT

    def _move_down(self, tier: Tier, victim: Block, writer: Sequence | None) -> Way:
        """Moves a block to the next tier that has slots; when it must be copied, its reference is the copy's."""
        lower = tier.below
        if lower is None:
            return _OUT
        # Without it its children in lower tiers would be worth nothing: it goes with them, whatever its priority.
        carries = self.window is None and victim.children is not None
        account = account_of(victim)
        closed = lower.is_closed(account)
        if not carries and victim.priority < offload_floor(victim, self.offload_min_priority):
            return _OUT
        if tier is self.device:
            copied = None if closed else self.backups.take(victim)
            if copied is not None:
                self._lie_below(lower, victim, copied)
                return _IN_BACKUP
            # A copy that is under way would come too late, and one that may not stay makes room.
            self.backups.drop(victim)
        moved: Block | None = None
        place = None if closed else self._empty_place(lower)
        if place is None:
            other = self._least(lower, account, writer)
            if other is None or not (carries or goes_before(other, victim)):
                return _OUT
            place = other.slot
            if other in self.moving:
                self._recall(lower, other, writer)
            elif self._vacate(lower, other, writer) is _BY_COPY:
                moved = other
        tier.counters.offloaded += 1
        tier.counters.copied_bytes += self.spec.block_bytes
        self._leave(tier, victim)
        self._change_place(tier, victim, lower, place)
        lower.used += 1
        if account is not None:
            lower.count(account, blocks=1, used=1)
        if moved is not None:
            self._moved(moved, victim, writer)
        return _BY_COPY

    def _empty_place(self, lower: Tier) -> int | None:
        """A place of a lower tier that holds nothing, or nothing but a copy of what the device holds."""
        if lower.empty or lower.unread:
            return lower.take_empty()
        return self.backups.give_way() if lower is self.backups.tier else None

    def _lie_below(self, lower: Tier, block: Block, place: int) -> None:
        """A device block that is evicted lies in its backup."""
        account = account_of(block)
        self.device.counters.offloaded += 1
        self._leave(self.device, block)
        self._change_place(self.device, block, lower, place)
        block.refs = 0
        lower.cached += 1
        lower.count(account, blocks=1)
        if self._is_evictable(block):
            lower.enlist(block, account, newest=False)
        self.write(block)

    def _least(self, lower: Tier, account: Account | None, writer: Sequence | None) -> Block | None:
        """What a lower tier loses next: a cached block, or one whose copy down nobody has been told of yet."""
        # At its ceiling an account takes the place of its own blocks only.
        shut = account is not None and lower.is_closed(account) and not lower.wants_own(account)
        least = None if shut else lower.victim(account) if lower.shares else lower.order.first()
        moving = None if writer is None else writer.opened.first(lower, account if shut else None)
        if moving is None or (least is not None and goes_before(least, moving)):
            return least
        return moving

    def _recall(self, lower: Tier, block: Block, writer: Sequence | None) -> None:
        """Loses a block whose copy down is called off."""
        assert self.on_recalled is not None
        assert writer is not None
        self.on_recalled(block, writer)
        block.refs = 0
        lower.used -= 1
        lower.count(account_of(block), blocks=-1, used=-1)
        if self.window is None and block.children is not None:
            self._lose_children(block)
        self._unlink(block, _EVICTED, writer)

    def _change_place(self, tier: Tier, block: Block, lower: Tier, place: int) -> None:
        """A block moves down from a tier to a lower one; its old slot is the caller's to fill."""
        parent = block.parent
        self.blocks[block.slot] = None
        block.slot = place
        self.blocks[place] = block
        tier.indexed -= 1
        lower.indexed += 1
        if self.window is None:
            children, device = block.children, self.device
            if isinstance(children, Block):
                block.near = int(self.tier_of(children) is lower)
            else:
                block.near = 0 if children is None else sum([self.tier_of(child) is lower for child in children])
            # What a device block stands on is on the device, too.
            if isinstance(parent, Block) and (tier is device or self.tier_of(parent) is tier):
                self._lose_near(parent, tier)
                if tier is device:
                    # What lies below now is worth nothing without it.
                    self.backups.want(parent)
        self._events.add(_UPDATED, self.view(block))

    def _moved(self, moved: Block, occupant: Block, writer: Sequence | None) -> None:
        assert self.on_moved is not None
        self.on_moved(moved, occupant, writer)
        # The ticket tells its generation.
        self.write(moved)

    def demote(self, block: Block) -> bool:
        """Moves an evictable device block down now; its slot stays reserved for the copy. False when it may not."""
        device, slot = self.device, block.slot
        device.delist(block, account_of(block))
        device.cached -= 1
        device.count(account_of(block), blocks=-1)
        block.refs = 1
        way = self._move_down(device, block, None)
        if way is _OUT:
            block.refs = 0
            device.cached += 1
            device.count(account_of(block), blocks=1)
            device.enlist(block, account_of(block), newest=False)
        elif way is _IN_BACKUP:
            device.empty.append(slot)
        else:
            occupant = Block(slot)
            occupant.refs = 1
            self.blocks[slot] = occupant
            device.used += 1
            self._moved(block, occupant, None)
            # Its slot is the copy's now.
            self.drop(occupant)
        return way is not _OUT
