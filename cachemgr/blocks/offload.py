"""Lower tiers: blocks are offloaded when their slots are needed, or written through to the next tier beforehand."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from cachemgr.blocks.block import Account, Block, Node, Writer, account_of
from cachemgr.blocks.eviction import Eviction, evict
from cachemgr.blocks.eviction_order import precedes
from cachemgr.blocks.prefix_tree import children_of
from cachemgr.blocks.tier import Tier
from cachemgr.retention.leases import offload_floor
from cachemgr.types import RemovalCause

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool, PoolListener


# Looked up once, not for each evicted block.
_DROPPED, _OFFLOADED, _ALREADY_BELOW = Eviction


class CopyTicket(Protocol):
    """An open copy from one tier to a lower tier. The copy has a reference to its target.

    `holds_source` says whether the copy has a reference to its source, too.
    """

    source: Block | None
    holds_source: bool

    @property
    def number(self) -> int: ...
    @property
    def target(self) -> Block: ...

    def offer(self) -> None:
        """Notes that the target's priority or children have changed, which matters while the copy can be recalled."""


class WriteThrough:
    """Copies of device blocks in the next tier that has slots, ahead of their eviction and of the loss of the device.

    The slot of a copy counts as free, and against no quota. The newest copy is dropped first, so that no block loses
    its copy before its descendants do.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        """If not `enabled`, no copy begins, but replaced blocks in lower tiers still become copies."""
        self._pool = pool
        self.tier = pool.device.below
        # Index of each copy by its device block.
        self.copies: dict[Block, int] = {}
        # Copies in flight, by device block. They refer to their target only.
        self.open: dict[Block, CopyTicket] = {}
        # The number of copies in flight, including cancelled copies.
        self.running = 0
        # Replaced blocks in lower tiers that copies still use, with the device blocks that have replaced them.
        self.successors: dict[Block, Block] = {}
        # Device blocks that may lack a copy; the newest entry is copied next.
        self.queue: deque[Block] = deque(maxlen=pool.device.size if enabled and self.tier is not None else 0)

    # Changes of blocks

    def enqueue(self, block: Block) -> None:
        self.queue.append(block)

    def superseded(self, old: Block, block: Block) -> None:
        """Makes the copy or lower slot of a replaced block the copy of the equal device block that has replaced it."""
        if self._pool.is_on_device(old):
            index = self.copies.pop(old, None)
            if index is not None:
                self.copies[block] = index
            self._cancel(old)
        else:
            self.successors[old] = block
        self.enqueue(block)

    def inherit(self, old: Block) -> bool:
        """Keeps a replaced block's lower slot as its successor's copy. False if no successor can use the slot."""
        block, pool = self.successors.pop(old, None), self._pool
        if block is None or old in pool.zero_on_free or pool.tier_of(old) is not self.tier:
            return False
        if block.parent is None or block.key != old.key or not pool.is_on_device(block) or block in self.copies:
            return False
        self._cancel(block)
        self.copies[block] = old.index
        pool.blocks[old.index] = None
        pool.report_stored(block)
        return True

    def reject(self, old: Block) -> None:
        """Notes that a lower block does not hold its bytes: its slot becomes no copy."""
        self.successors.pop(old, None)

    def end(self, block: Block) -> None:
        """Frees the copy of a block that left the device or tree. If the block must be overwritten, so is the copy."""
        pool = self._pool
        zeroed = block in pool.zero_on_free
        index = self.copies.pop(block, None)
        if index is not None:
            assert self.tier is not None
            if zeroed:
                copy = pool.blocks[index] = Block(index)
                pool.zero(copy)
            else:
                self.tier.empty.append(index)
        self._cancel(block)
        if zeroed:
            pool.zero_on_free.update(below for below, successor in self.successors.items() if successor is block)

    def _cancel(self, block: Block) -> None:
        """Marks the block's copy in flight, if there is one, as useless."""
        ticket = self.open.pop(block, None)
        if ticket is not None:
            ticket.source = None
            if block in self._pool.zero_on_free:
                self._pool.zero_on_free.add(ticket.target)

    def indexes_of(self, block: Block) -> list[int]:
        """Indexes of lower slots that may hold a device block's bytes; the slots' generations decide."""
        index, ticket = self.copies.get(block), self.open.get(block)
        found = [] if index is None else [index]
        if ticket is not None:
            found.append(ticket.target.index)
        return found + [
            below.index for below, successor in self.successors.items() if successor is block and below.key == block.key
        ]

    # Slots

    def pop_newest(self) -> int | None:
        """Drops the newest copy and returns its index; None if there is none."""
        if not self.copies:
            return None
        block, index = self.copies.popitem()
        self.enqueue(block)
        self._pool.report_stored(block)
        return index

    # New copies

    def next(self, limit: int) -> list[Block]:
        """Blocks to copy down now, at most `limit`, parents before children."""
        found: dict[Block, None] = {}
        # An unread slot may hold a stored block.
        known = self.tier is not None and self.tier.unread is None
        most = min(limit, self.tier.num_empty) if known and self.tier is not None else 0
        while self.queue and len(found) < most:
            chain = self._chain(self.queue[-1], found)
            if len(found) + len(chain) <= most:
                self.queue.pop()
            found.update(dict.fromkeys(chain[: most - len(found)]))
        return list(found)

    def _chain(self, block: Block, found: dict[Block, None]) -> list[Block]:
        """A block and its ancestors that have no copy yet; empty if the block should have no copy."""
        pool, chain = self._pool, list[Block]()
        if not self._should_have_copy(block):
            return chain
        node: Node | None = block
        while isinstance(node, Block) and not (node in self.copies or node in self.open or node in found):
            chain.append(node)
            node = node.parent if pool.window is None else None
        return chain[::-1]

    def _should_have_copy(self, block: Block) -> bool:
        pool, tier = self._pool, self.tier
        if (
            tier is None
            or block.parent is None
            or not pool.is_on_device(block)
            or tier.accounts.is_closed(account_of(block))
        ):
            return False
        if block.priority >= offload_floor(block, pool.offload_min_priority):
            return True
        # Children in lower tiers are useless without the block.
        return pool.window is None and any(not pool.is_on_device(child) for child in children_of(block))

    def begun(self, ticket: CopyTicket) -> None:
        assert ticket.source is not None
        self.open[ticket.source] = ticket
        self.running += 1

    def ended(self, ticket: CopyTicket, *, done: bool) -> None:
        """Notes that a copy has ended; the caller releases its target next."""
        self.running -= 1
        block = ticket.source
        if block is None:
            return
        del self.open[block]
        if done:
            assert self.tier is not None
            self.tier.counters.written_through += 1
            ticket.target.key = block.key
            self.successors[ticket.target] = block


class Offloader:
    """Moves evictable blocks of a pool to the next lower tier, and tracks the copies in flight."""

    def __init__(self, pool: BlockPool, write_through: WriteThrough, listener: PoolListener) -> None:
        self._pool = pool
        self._write_through = write_through
        self._listener = listener
        # Blocks in lower tiers whose copies are in flight; no sequence may match these blocks.
        self.offloading: dict[Block, CopyTicket] = {}
        # Blocks that are not computed yet, in slots whose former bytes have yet to be copied.
        self.draining: dict[Block | None, CopyTicket] = {}

    def offload(self, tier: Tier, victim: Block, writer: Writer | None) -> Eviction:
        """Moves a block to the next tier with slots. A copy, if needed, has a reference to the block.

        Returns DROPPED, without a change, if the block cannot or need not be offloaded; the caller drops the block.
        """
        pool, lower = self._pool, tier.below
        if lower is None:
            return _DROPPED
        # Children in lower tiers are useless without the block, so it is offloaded whatever its priority.
        carries = pool.window is None and victim.children is not None
        account = account_of(victim)
        closed = lower.accounts.is_closed(account)
        if not carries and victim.priority < offload_floor(victim, pool.offload_min_priority):
            return _DROPPED
        if tier is pool.device:
            copied = None if closed else self._write_through.copies.pop(victim, None)
            if copied is not None:
                self._lie_below(lower, victim, copied)
                return _ALREADY_BELOW
        moved: Block | None = None
        index = None if closed else self._empty_index(lower)
        if index is None:
            other = self._least(lower, account, writer)
            if other is None or not (carries or precedes(other, victim)):
                return _DROPPED
            index = other.index
            if other in self.offloading:
                self._recall(lower, other, writer)
            elif evict(pool, lower, other, writer) is _OFFLOADED:
                moved = other
        if tier is pool.device:
            # A copy in flight would be too late, and the slot of a copy that must not stay becomes free.
            self._write_through.end(victim)
        victim.refs = 1
        tier.counters.offloaded += 1
        tier.counters.copied_bytes += pool.spec.block_bytes
        pool.report_removed(tier, victim)
        self._move(tier, victim, lower, index)
        lower.used += 1
        if account is not None:
            lower.accounts.count(account, blocks=1, used=1)
        if moved is not None:
            self.begin(moved, victim, writer)
        return _OFFLOADED

    def begin(self, moved: Block, occupant: Block, writer: Writer | None) -> None:
        """Opens the copy of a block that has moved; `occupant` has the old slot."""
        ticket = self._listener.offloading(self._pool, moved, occupant, writer)
        self.offloading[moved] = self.draining[occupant] = ticket
        # The record has the ticket as its generation.
        self._pool.report_stored(moved)

    def ended(self, ticket: CopyTicket) -> None:
        self.offloading.pop(ticket.target, None)
        if self.draining.get(ticket.source) is ticket:
            del self.draining[ticket.source]

    def drained(self, block: Block) -> None:
        """Notes that a block is computed, so the former bytes of its slot are copied, confirmed or not.

        From now on, the slot is free as soon as the block has no references.
        """
        if self.draining:
            self.draining.pop(block, None)

    def reserve(self, block: Block) -> bool:
        """Reserves a block's slot for the copy of the slot's former bytes. False if there is no such copy."""
        if block not in self.draining:
            return False
        self.draining.pop(block).holds_source = True
        block.refs, block.scope = 1, None
        return True

    def offer(self, block: Block) -> None:
        """Updates the block's place in the eviction order if its copy can be recalled."""
        ticket = self.offloading.get(block) if self.offloading else None
        if ticket is not None:
            ticket.offer()

    def demote(self, block: Block) -> bool:
        """Offloads an evictable device block now; a copy reserves its slot. False if the block cannot be offloaded."""
        pool, device, slot, account = self._pool, self._pool.device, block.index, account_of(block)
        device.accounts.delist(block, account)
        device.cached -= 1
        device.accounts.count(account, blocks=-1)
        way = self.offload(device, block, None)
        if way is _DROPPED:
            device.cached += 1
            device.accounts.count(account, blocks=1)
            device.accounts.enlist(block, account, newest=False)
        elif way is _ALREADY_BELOW:
            device.empty.append(slot)
        else:
            occupant = Block(slot)
            occupant.refs = 1
            pool.blocks[slot] = occupant
            device.used += 1
            self.begin(block, occupant, None)
            # The slot belongs to the copy now.
            pool.release(occupant)
        return way is not _DROPPED

    def _empty_index(self, lower: Tier) -> int | None:
        """The index of a slot of a lower tier that is empty, or that holds a write-through copy."""
        if lower.empty or lower.unread:
            return lower.take_empty()
        return self._write_through.pop_newest() if lower is self._write_through.tier else None

    def _lie_below(self, lower: Tier, block: Block, index: int) -> None:
        """Moves a device block to the slot of its write-through copy."""
        pool, account = self._pool, account_of(block)
        pool.device.counters.offloaded += 1
        pool.report_removed(pool.device, block)
        self._move(pool.device, block, lower, index)
        lower.cached += 1
        lower.accounts.count(account, blocks=1)
        if pool.is_evictable(block):
            lower.accounts.enlist(block, account, newest=False)
        pool.report_stored(block)

    def _least(self, lower: Tier, account: Account | None, writer: Writer | None) -> Block | None:
        """The block that a lower tier evicts next: a cached block, or a block whose copy can be recalled."""
        # At its ceiling, an account replaces only its own blocks.
        accounts = lower.accounts
        shut = account is not None and accounts.is_closed(account) and not accounts.wants_own(account)
        least = None if shut else accounts.victim(account)
        moving = None if writer is None else writer.opened.first(lower, account if shut else None)
        if moving is None or (least is not None and precedes(least, moving)):
            return least
        return moving

    def _recall(self, lower: Tier, block: Block, writer: Writer | None) -> None:
        """Cancels the copy of a block and drops the block."""
        assert writer is not None
        pool, ticket = self._pool, self.offloading.pop(block)
        del self.draining[ticket.source]
        self._listener.offload_recalled(ticket, writer)
        block.refs = 0
        lower.used -= 1
        lower.accounts.count(account_of(block), blocks=-1, used=-1)
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
                    # The child in the lower tier is useless without its parent.
                    self._write_through.enqueue(parent)
        pool.report_updated(block)
