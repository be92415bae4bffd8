"""Blocks, and the order in which cached ones are lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cachemgr.retention import DEFAULT_PRIORITY, MAX_PRIORITY

if TYPE_CHECKING:
    from cachemgr.keys import Domain
    from cachemgr.sequence import Sequence


class Node:
    """A place in the prefix tree: a block, the root of a chain, or the gap that a lost block left.

    `children` is None, the only child, or a list sorted by tokens; `siblings` is what reads and changes it.
    """

    __slots__ = ("children", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.children: Block | list[Block] | None = None


class Block(Node):
    """A slot with its content. Indexed when it has a parent; then key, tokens, depth and domain are set.

    `writer` is the sequence that fills it, as long as what it wrote is not proven to be there.
    """

    __slots__ = (
        "depth",
        "domain",
        "newer",
        "older",
        "parent",
        "recency",
        "refs",
        "slot",
        "stored_step",
        "tokens",
        "wish",
        "writer",
    )

    def __init__(self, slot: int, writer: Sequence | None = None) -> None:
        # Not by way of super: a block is made for every one that is taken.
        self.key = b""
        self.children = None
        self.slot = slot
        self.refs = 0
        self.writer = writer
        self.parent: Node | None = None
        self.tokens = b""
        self.depth = 0
        self.domain: Domain | None = None
        self.wish: int | None = None
        self.stored_step = 0
        self.recency = 0
        self.older: Block | None = None
        self.newer: Block | None = None

    @property
    def priority(self) -> int:
        """Effective priority."""
        return DEFAULT_PRIORITY if self.wish is None else self.wish


class EvictionOrder:
    """Blocks that may be evicted now: a ring per priority, least recently used first, and a bit per non-empty ring."""

    __slots__ = ("_bits", "_rings")

    def __init__(self) -> None:
        self._bits = 0
        self._rings: list[Block] = []
        for _ in range(MAX_PRIORITY + 1):
            ring = Block(0)
            ring.older = ring.newer = ring
            self._rings.append(ring)

    def append(self, block: Block) -> None:
        """Adds a block that was used more recently than all others."""
        priority = block.priority
        ring = self._rings[priority]
        newest = ring.older
        assert newest is not None
        self._link(newest, block, ring)
        self._bits |= 1 << priority

    def insert(self, block: Block) -> None:
        """Adds a block at the place that its recency gives it: looks from both ends, as most belong near one."""
        priority = block.priority
        ring = self._rings[priority]
        self._bits |= 1 << priority
        low, high = ring.newer, ring.older
        recency = block.recency
        while True:
            assert low is not None
            assert high is not None
            if low is ring or low.recency > recency:
                assert low.older is not None
                self._link(low.older, block, low)
                return
            if high is ring or high.recency < recency:
                assert high.newer is not None
                self._link(high, block, high.newer)
                return
            low, high = low.newer, high.older

    def remove(self, block: Block) -> None:
        """Takes a block out; its priority must be the one that it was added with."""
        older, newer = block.older, block.newer
        assert older is not None
        assert newer is not None
        older.newer = newer
        newer.older = older
        block.older = block.newer = None
        if older is newer:
            priority = block.priority
            if older is self._rings[priority]:
                self._bits &= ~(1 << priority)

    def first(self) -> Block | None:
        """The block to lose next."""
        bits = self._bits
        if not bits:
            return None
        return self._rings[(bits & -bits).bit_length() - 1].newer

    @staticmethod
    def _link(older: Block, block: Block, newer: Block) -> None:
        block.older = older
        block.newer = newer
        older.newer = block
        newer.older = block

    def rings(self) -> Iterator[tuple[int, bool, list[Block]]]:
        """Priority, its bit and its blocks, oldest first; for checks."""
        for priority, ring in enumerate(self._rings):
            blocks = []
            block = ring.newer
            while block is not None and block is not ring:
                blocks.append(block)
                block = block.newer
            yield priority, bool(self._bits >> priority & 1), blocks
