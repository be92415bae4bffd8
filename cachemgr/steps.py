"""Calls that touch very many blocks, in steps: each is whole by itself, and others are answered between two of them.

A step depends on nothing but the manager's state, so a log of the steps leads to the same state again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from cachemgr import siblings

if TYPE_CHECKING:
    from cachemgr.block import Block
    from cachemgr.pool import Pool

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
        self._by_depth: dict[int, dict[bytes, tuple[Pool, ...]]] = {}
        # A tuple for all blocks of the same pools: a million objects would set off a garbage collection of everything.
        self._pools: dict[tuple[tuple[Pool, ...], Pool], tuple[Pool, ...]] = {}

    def add(self, pool: Pool, block: Block) -> None:
        """One of them."""
        keyed = self._by_depth.setdefault(block.depth, {})
        pools = keyed.get(block.key, ())
        if pool not in pools:
            keyed[block.key] = self._pools.setdefault((pools, pool), (*pools, pool))

    def means(self, pool: Pool, block: Block) -> bool:
        """Whether a block is one of them, in this pool."""
        return pool in self._by_depth.get(block.depth, {}).get(block.key, ())

    def blocks(self) -> Iterator[tuple[Pool, Block]]:
        """Those that are still there."""
        for found in self._by_depth.values():
            for key, pools in found.items():
                for pool in pools:
                    block = pool.index.get(key)
                    if block is not None:
                        yield pool, block

    def deepest_first(self) -> Iterator[tuple[bytes, tuple[Pool, ...]]]:
        """All, once: what stands on a block comes before it."""
        for depth in sorted(self._by_depth, reverse=True):
            yield from self._by_depth.pop(depth).items()


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
