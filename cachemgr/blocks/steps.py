"""Calls that touch very many blocks, in steps: each is whole by itself, and others are answered between two of them.

A step depends on nothing but the manager's state, so a log of the steps leads to the same state again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from cachemgr.blocks import children as siblings

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import Pool

# Blocks that one step looks at, and that one step changes: some milliseconds each.
LOOKS, CHANGES = 8192, 256

T = TypeVar("T")
Steps = Generator[None, None, T]


def at_once(steps: Steps[T]) -> T:
    """What a call comes to, with nothing in between."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            found: T = ended.value
            return found


def looks(items: Iterable[T]) -> Iterator[list[T]]:
    """As many as one step looks at, at a time."""
    return _parted(items, LOOKS)


def drained(items: list[T]) -> Iterator[list[T]]:
    """As `looks`, from the end, and nothing stays: a garbage collection walks all of a list that is young."""
    while items:
        part = items[-LOOKS:]
        del items[-LOOKS:]
        yield part


def changes(items: Iterable[T]) -> Iterator[list[T]]:
    """As many as one step changes, at a time."""
    return _parted(items, CHANGES)


def _parted(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


class Doomed:
    """Blocks of one executor that are to leave the index, by their keys: until their turn they may go or move."""

    def __init__(self) -> None:
        # By depth and key the number of the pools: a dictionary of bytes and numbers is nothing that a garbage
        # collection walks, which takes 50 ms for a million keys.
        self._by_depth: dict[int, dict[bytes, int]] = {}
        self._holders: list[tuple[Pool, ...]] = [()]
        self._numbers: dict[tuple[int, Pool], int] = {}

    def add(self, pool: Pool, block: Block) -> bool:
        """One of them. False when it was one already."""
        keyed = self._by_depth.setdefault(block.depth, {})
        number = keyed.get(block.key, 0)
        if pool in self._holders[number]:
            return False
        keyed[block.key] = self._with(number, pool)
        return True

    def add_all(self, pool: Pool, blocks: list[Block]) -> Steps[None]:
        """These that are still there, with full attention and all that stands on them. It uses the list up."""
        at = 0
        while blocks:
            rest = [blocks.pop()]
            while rest:
                block = rest.pop()
                if block.parent is not None and self.add(pool, block) and pool.window is None:
                    rest.extend(siblings.each(block))
                at += 1
                if at % LOOKS == 0:
                    yield

    def of_full_attention(self) -> Iterator[bytes]:
        """Keys of those that a pool with full attention loses; values of known keys may be added meanwhile."""
        for keyed in self._by_depth.values():
            for key, number in keyed.items():
                if any(pool.window is None for pool in self._holders[number]):
                    yield key

    def _with(self, number: int, pool: Pool) -> int:
        if (number, pool) not in self._numbers:
            self._numbers[number, pool] = len(self._holders)
            self._holders.append((*self._holders[number], pool))
        return self._numbers[number, pool]

    def means(self, pool: Pool, block: Block) -> bool:
        """Whether a block is one of them, in this pool."""
        return pool in self._holders[self._by_depth.get(block.depth, {}).get(block.key, 0)]

    def blocks(self) -> Iterator[tuple[Pool, Block]]:
        """Those that are still there."""
        for found in self._by_depth.values():
            for key, number in found.items():
                for pool in self._holders[number]:
                    block = pool.index.get(key)
                    if block is not None:
                        yield pool, block

    def deepest_first(self) -> Iterator[tuple[bytes, tuple[Pool, ...]]]:
        """All, once: what stands on a block comes before it."""
        for depth in sorted(self._by_depth, reverse=True):
            for key, number in self._by_depth.pop(depth).items():
                yield key, self._holders[number]


def with_descendants(blocks: Iterable[Block]) -> Steps[dict[Block, None]]:
    """These blocks and all that stands on them when they are met."""
    found: dict[Block, None] = {}
    at = 0
    for first in blocks:
        # Not all of them: a list of a million that is made at once is young, and the next collections walk all of it.
        rest = [first]
        while rest:
            block = rest.pop()
            if block not in found and block.parent is not None:
                found[block] = None
                rest.extend(siblings.each(block))
            at += 1
            if at % LOOKS == 0:
                yield
    return found
