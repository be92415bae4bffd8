"""Copies of device blocks one tier below: with them an eviction needs no copy, and a device that is lost loses less."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.quota import account_of
from cachemgr.blocks.radix_tree import children_of
from cachemgr.retention.leases import offload_floor

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.blocks.offload import CopyTicket
    from cachemgr.blocks.tier import Tier


class Backups:
    """Which indexed blocks of a pool's device also lie in the next tier that has slots.

    A backup lies there as long as nobody wants its slot: that counts as free, and against no quota. The one that was
    made last goes first, so that no block loses its own while one that stands on it has one.
    """

    def __init__(self, pool: BlockPool, *, write_through: bool) -> None:
        self._pool = pool
        self.tier: Tier | None = next((tier for tier in pool.tiers[1:] if tier.size), None)
        # Place of each backup by its device block.
        self.indexes: dict[Block, int] = {}
        # Copies to new ones that are under way, by device block. Nothing is reserved for them but their target.
        self.open: dict[Block, CopyTicket] = {}
        # Copies under way, with those that are no longer wanted.
        self.running = 0
        # Blocks below that copies still use, and the device blocks that have taken their indexes in the index.
        self.heirs: dict[Block, Block] = {}
        # Device blocks that may have none, the most wanted last.
        self.wanting: deque[Block] = deque(maxlen=pool.device.size if write_through and self.tier is not None else 0)

    # What happens to blocks

    def want(self, block: Block) -> None:
        """A device block may have none."""
        self.wanting.append(block)

    def pass_on(self, old: Block, block: Block) -> None:
        """A device block has taken the index of another block in the index: what was the other's copy is its own."""
        if self._pool.is_on_device(old):
            index = self.indexes.pop(old, None)
            if index is not None:
                self.indexes[block] = index
            self._forsake(old)
        else:
            self.heirs[old] = block
        self.want(block)

    def inherit(self, old: Block) -> bool:
        """A slot below is neither used nor in the index: whether it stays, as the backup of who has taken its index."""
        block, pool = self.heirs.pop(old, None), self._pool
        if block is None or old in pool.zero_on_free or pool.tier_of(old) is not self.tier:
            return False
        if block.parent is None or block.key != old.key or not pool.is_on_device(block) or block in self.indexes:
            return False
        self._forsake(block)
        self.indexes[block] = old.index
        pool.blocks[old.index] = None
        pool.write(block)
        return True

    def disown(self, old: Block) -> None:
        """A block below does not hold what it should: nobody inherits its slot."""
        self.heirs.pop(old, None)

    def drop(self, block: Block) -> None:
        """A block has left the device or the index. Of one whose bytes may not outlive it no copy does."""
        pool = self._pool
        doomed = block in pool.zero_on_free
        index = self.indexes.pop(block, None)
        if index is not None:
            assert self.tier is not None
            if doomed:
                copy = pool.blocks[index] = Block(index)
                pool.zero(copy)
            else:
                self.tier.empty.append(index)
        self._forsake(block)
        if doomed:
            pool.zero_on_free.update(below for below, heir in self.heirs.items() if heir is block)

    def _forsake(self, block: Block) -> None:
        """The copy of a block that is under way, if one is, will be nobody's."""
        ticket = self.open.pop(block, None)
        if ticket is not None:
            ticket.source = None
            if block in self._pool.zero_on_free:
                self._pool.zero_on_free.add(ticket.target)

    def copies(self, block: Block) -> list[int]:
        """Places that may hold what a device block does, should the device be lost now: tickets tell."""
        index, ticket = self.indexes.get(block), self.open.get(block)
        found = [] if index is None else [index]
        if ticket is not None:
            found.append(ticket.target.index)
        return found + [below.index for below, heir in self.heirs.items() if heir is block and below.key == block.key]

    # Slots

    def take(self, block: Block) -> int | None:
        """The index of a block's backup, where it lies from now on."""
        return self.indexes.pop(block, None)

    def give_way(self) -> int | None:
        """The index of the backup that goes first; None when there is none."""
        if not self.indexes:
            return None
        block, index = self.indexes.popitem()
        self.want(block)
        self._pool.write(block)
        return index

    # Making more

    def next(self, limit: int) -> list[Block]:
        """Blocks to copy down now, at most so many, what others stand on first."""
        found: dict[Block, None] = {}
        # No backup is worth a slot that a remembered block may be in.
        known = self.tier is not None and self.tier.unread is None
        room = min(limit, self.tier.num_empty) if known and self.tier is not None else 0
        while self.wanting and len(found) < room:
            chain = self._chain(self.wanting[-1], found)
            if len(found) + len(chain) <= room:
                self.wanting.pop()
            found.update(dict.fromkeys(chain[: room - len(found)]))
        return list(found)

    def _chain(self, block: Block, found: dict[Block, None]) -> list[Block]:
        """A block and what it stands on, as far as that has no backup; empty for one that should have none."""
        pool, chain = self._pool, list[Block]()
        if not self._deserves(block):
            return chain
        node: Node | None = block
        while isinstance(node, Block) and not (node in self.indexes or node in self.open or node in found):
            chain.append(node)
            node = node.parent if pool.window is None else None
        return chain[::-1]

    def _deserves(self, block: Block) -> bool:
        pool, tier = self._pool, self.tier
        if tier is None or block.parent is None or not pool.is_on_device(block) or tier.is_closed(account_of(block)):
            return False
        if block.priority >= offload_floor(block, pool.offload_min_priority):
            return True
        # What lies below is worth nothing without it.
        return pool.window is None and any(not pool.is_on_device(child) for child in children_of(block))

    def begun(self, ticket: CopyTicket) -> None:
        """A copy is under way."""
        assert ticket.source is not None
        self.open[ticket.source] = ticket
        self.running += 1

    def ended(self, ticket: CopyTicket, *, done: bool) -> None:
        """A copy has ended, and lets go of its target next."""
        self.running -= 1
        block = ticket.source
        if block is None:
            return
        del self.open[block]
        if done:
            assert self.tier is not None
            self.tier.counters.backed_up += 1
            ticket.target.key = block.key
            self.heirs[ticket.target] = block
