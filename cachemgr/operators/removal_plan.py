"""The blocks of an executor that a purge or a forget takes out of the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cachemgr.blocks.block import Block
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.prefix_tree import children_of
from cachemgr.slices import LOOKS, Slices


class RemovalPlan:
    """Blocks of one executor to remove, by key, since blocks may be evicted or moved before their turn."""

    def __init__(self) -> None:
        # By depth and key: the pools, as one number. A garbage collection does not walk a dictionary of bytes and
        # numbers; a walk of a million keys takes 50 ms.
        self._by_depth: dict[int, dict[bytes, int]] = {}
        self._holders: list[tuple[BlockPool, ...]] = [()]
        self._numbers: dict[tuple[int, BlockPool], int] = {}

    def add(self, pool: BlockPool, block: Block) -> bool:
        """Adds a block. False if the plan already has it."""
        keyed = self._by_depth.setdefault(block.depth, {})
        number = keyed.get(block.key, 0)
        if pool in self._holders[number]:
            return False
        keyed[block.key] = self._with(number, pool)
        return True

    def add_all(self, pool: BlockPool, blocks: list[Block]) -> Slices[None]:
        """Adds the blocks that are still indexed; with full attention, also their descendants.

        Consumes the list.
        """
        at = 0
        while blocks:
            rest = [blocks.pop()]
            while rest:
                block = rest.pop()
                if block.parent is not None and self.add(pool, block) and pool.window is None:
                    rest.extend(children_of(block))
                at += 1
                if at % LOOKS == 0:
                    yield

    def of_full_attention(self) -> Iterator[bytes]:
        """Yields the keys of blocks of pools with full attention. Meanwhile, pools may be added to known keys."""
        for keyed in self._by_depth.values():
            for key, number in keyed.items():
                if any(pool.window is None for pool in self._holders[number]):
                    yield key

    def _with(self, number: int, pool: BlockPool) -> int:
        if (number, pool) not in self._numbers:
            self._numbers[number, pool] = len(self._holders)
            self._holders.append((*self._holders[number], pool))
        return self._numbers[number, pool]

    def means(self, pool: BlockPool, block: Block) -> bool:
        """Whether the plan has a block of this pool."""
        return pool in self._holders[self._by_depth.get(block.depth, {}).get(block.key, 0)]

    def blocks(self) -> Iterator[tuple[BlockPool, Block]]:
        """Yields the blocks that are still indexed."""
        for found in self._by_depth.values():
            for key, number in found.items():
                for pool in self._holders[number]:
                    block = pool.tree.by_key.get(key)
                    if block is not None:
                        yield pool, block

    def deepest_first(self) -> Iterator[tuple[bytes, tuple[BlockPool, ...]]]:
        """Yields every key once, with its pools, descendants before their ancestors. Empties the plan."""
        for depth in sorted(self._by_depth, reverse=True):
            for key, number in self._by_depth.pop(depth).items():
                yield key, self._holders[number]


def with_descendants(blocks: Iterable[tuple[Block, bytes]]) -> Slices[dict[Block, bytes]]:
    """Returns these blocks, each with its key, and their present descendants.

    Between two slices, a block may leave the index and return with a different key.
    """
    found: dict[Block, bytes] = {}
    at = 0
    for first in blocks:
        # Not all at once: the next garbage collections would walk all of a new list of a million entries.
        rest = [first]
        while rest:
            block, key = rest.pop()
            if block not in found and block.parent is not None and block.key == key:
                found[block] = key
                rest.extend((child, child.key) for child in children_of(block))
            at += 1
            if at % LOOKS == 0:
                yield
    return found
