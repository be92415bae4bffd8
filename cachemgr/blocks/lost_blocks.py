"""Blocks of lost executors, freed in parts."""

from __future__ import annotations

from cachemgr.blocks.block import Block
from cachemgr.retention.leases import LeaseBook


class LostBlocks:
    """Blocks of lost executors that only running leases refer to.

    The blocks are freed in parts, since freeing a million blocks at once would take too long.
    """

    def __init__(self, leases: LeaseBook) -> None:
        self._leases = leases
        self._rest: list[tuple[list[Block | None], dict[bytes, Block]]] = []

    def __len__(self) -> int:
        return sum(len(blocks) + len(index) for blocks, index in self._rest)

    def add(self, blocks: list[Block | None], index: dict[bytes, Block]) -> None:
        """Takes `blocks` and `index` from a pool that no longer uses them."""
        self._rest.append((blocks, index))

    def free_some(self, count: int) -> None:
        """Frees about `count` entries."""
        while self._rest and count > 0:
            blocks, index = self._rest[-1]
            part = blocks[-count:]
            del blocks[-count:]
            for block in filter(None, part):
                block.detach()
                self._leases.forget(block)
            count -= len(part)
            for _ in range(min(count, len(index))):
                index.popitem()
                count -= 1
            if not blocks and not index:
                self._rest.pop()
