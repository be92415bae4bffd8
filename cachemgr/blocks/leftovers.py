"""What lost executors had. It is freed a part at a time: to free a million blocks at once would hold everybody up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.retention.leases import LeaseBook


class Leftovers:
    """Blocks that nothing can reach any more, but leases whose time is not over."""

    def __init__(self, leases: LeaseBook) -> None:
        self._leases = leases
        self._rest: list[tuple[list[Block | None], dict[bytes, Block]]] = []

    def __len__(self) -> int:
        return sum(len(blocks) + len(index) for blocks, index in self._rest)

    def add(self, blocks: list[Block | None], index: dict[bytes, Block]) -> None:
        """The places and the index of a pool, which uses them no longer."""
        self._rest.append((blocks, index))

    def let_go(self, count: int) -> None:
        """Frees about so many."""
        while self._rest and count > 0:
            blocks, index = self._rest[-1]
            part = blocks[-count:]
            del blocks[-count:]
            for block in filter(None, part):
                # Else they would hold each other until the next full garbage collection.
                block.parent = block.children = block.older = block.newer = None
                self._leases.forget(block)
            count -= len(part)
            for _ in range(min(count, len(index))):
                index.popitem()
                count -= 1
            if not blocks and not index:
                self._rest.pop()
