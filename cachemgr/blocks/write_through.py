"""Write-through: device blocks are copied to the next tier ahead of their eviction, and of the loss of the device."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from cachemgr.blocks.block import Block, Node, account_of
from cachemgr.blocks.radix_tree import children_of
from cachemgr.blocks.tier import Tier
from cachemgr.retention.leases import offload_floor


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


class TieredPool(Protocol):
    """The pool as its backups see it."""

    blocks: list[Block | None]
    zero_on_free: set[Block]
    window: int | None
    offload_min_priority: int

    @property
    def tiers(self) -> tuple[Tier, ...]: ...
    def tier_of(self, block: Block) -> Tier: ...
    def is_on_device(self, block: Block) -> bool: ...
    def zero(self, block: Block) -> None: ...
    def report_stored(self, block: Block) -> None: ...


class Backups:
    """Backups of device blocks in the next tier that has slots.

    The slot of a backup counts as free, and against no quota. The newest backup gives way first, so that no block loses
    its own before its descendants do.
    """

    def __init__(self, pool: TieredPool, *, write_through: bool) -> None:
        self._pool = pool
        self.tier: Tier | None = next((tier for tier in pool.tiers[1:] if tier.size), None)
        # Index of each backup by its device block.
        self.indexes: dict[Block, int] = {}
        # Copies in flight, by device block. They have a reference to their target only.
        self.open: dict[Block, CopyTicket] = {}
        # Copies in flight, with those that make no backup any more.
        self.running = 0
        # Replaced blocks below that copies still use, with the device blocks that have replaced them.
        self.successors: dict[Block, Block] = {}
        # Device blocks that may have none, the next to get one last.
        self.queue: deque[Block] = deque(maxlen=pool.tiers[0].size if write_through and self.tier is not None else 0)

    # What happens to blocks

    def enqueue(self, block: Block) -> None:
        self.queue.append(block)

    def superseded(self, old: Block, block: Block) -> None:
        """A device block has replaced an equal block, whose backup or slot below is its backup now."""
        if self._pool.is_on_device(old):
            index = self.indexes.pop(old, None)
            if index is not None:
                self.indexes[block] = index
            self._cancel(old)
        else:
            self.successors[old] = block
        self.enqueue(block)

    def inherit(self, old: Block) -> bool:
        """Keeps the slot of a replaced block below as the backup of its successor. False if that has no use for it."""
        block, pool = self.successors.pop(old, None), self._pool
        if block is None or old in pool.zero_on_free or pool.tier_of(old) is not self.tier:
            return False
        if block.parent is None or block.key != old.key or not pool.is_on_device(block) or block in self.indexes:
            return False
        self._cancel(block)
        self.indexes[block] = old.index
        pool.blocks[old.index] = None
        pool.report_stored(block)
        return True

    def reject(self, old: Block) -> None:
        """A block below does not hold its bytes: its slot becomes no backup."""
        self.successors.pop(old, None)

    def end(self, block: Block) -> None:
        """A block has left the device or the prefix tree: frees its backup, or overwrites it as its own slot."""
        pool = self._pool
        zeroed = block in pool.zero_on_free
        index = self.indexes.pop(block, None)
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
        """A copy of a block that is in flight, if there is one, makes no backup."""
        ticket = self.open.pop(block, None)
        if ticket is not None:
            ticket.source = None
            if block in self._pool.zero_on_free:
                self._pool.zero_on_free.add(ticket.target)

    def copies(self, block: Block) -> list[int]:
        """Indexes of slots below that may hold a device block's bytes; their generations tell."""
        index, ticket = self.indexes.get(block), self.open.get(block)
        found = [] if index is None else [index]
        if ticket is not None:
            found.append(ticket.target.index)
        return found + [
            below.index for below, successor in self.successors.items() if successor is block and below.key == block.key
        ]

    # Slots

    def pop_newest(self) -> int | None:
        """The index of the newest backup, which ends; None when there is none."""
        if not self.indexes:
            return None
        block, index = self.indexes.popitem()
        self.enqueue(block)
        self._pool.report_stored(block)
        return index

    # Making more

    def next(self, limit: int) -> list[Block]:
        """Blocks to copy down now, at most `limit`, parents before children."""
        found: dict[Block, None] = {}
        # A remembered block may be in an unread slot.
        known = self.tier is not None and self.tier.unread is None
        room = min(limit, self.tier.num_empty) if known and self.tier is not None else 0
        while self.queue and len(found) < room:
            chain = self._chain(self.queue[-1], found)
            if len(found) + len(chain) <= room:
                self.queue.pop()
            found.update(dict.fromkeys(chain[: room - len(found)]))
        return list(found)

    def _chain(self, block: Block, found: dict[Block, None]) -> list[Block]:
        """A block and its ancestors that have no backup yet; empty for a block that should have none."""
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
        # Its children below are useless without it.
        return pool.window is None and any(not pool.is_on_device(child) for child in children_of(block))

    def begun(self, ticket: CopyTicket) -> None:
        assert ticket.source is not None
        self.open[ticket.source] = ticket
        self.running += 1

    def ended(self, ticket: CopyTicket, *, done: bool) -> None:
        """A copy has ended; the caller releases its target next."""
        self.running -= 1
        block = ticket.source
        if block is None:
            return
        del self.open[block]
        if done:
            assert self.tier is not None
            self.tier.counters.backed_up += 1
            ticket.target.key = block.key
            self.successors[ticket.target] = block
