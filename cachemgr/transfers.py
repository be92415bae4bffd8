"""Tickets for copies: source and target stay reserved until the executor answers or the scheduler cancels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.api import Transfer

if TYPE_CHECKING:
    from cachemgr.block import Block
    from cachemgr.pool import Pool
    from cachemgr.sequence import GroupTable, Sequence


class Ticket:
    """One open copy.

    Takes over a reference to its source, adds one to its target, and holds `anchors` once its sequence is gone.
    """

    __slots__ = ("anchors", "index", "num_tokens", "number", "pool", "scheduler", "sequence", "source", "target")

    def __init__(
        self, number: int, pool: Pool, source: Block, target: Block, num_tokens: int, index: int, sequence: Sequence
    ) -> None:
        self.number = number
        self.pool = pool
        self.source = source
        self.target = target
        self.num_tokens = num_tokens
        # Place of the target in the sequence's table.
        self.index = index
        self.scheduler = sequence.scheduler
        self.sequence: Sequence | None = sequence
        self.anchors: list[Block] = []
        pool.retain(target)
        sequence.tickets.add(self)
        sequence.executor.tickets[number] = self

    @property
    def transfer(self) -> Transfer:
        """The ticket as the scheduler sees it."""
        spec = self.pool.spec
        return Transfer(self.number, spec.group, self.source.slot, self.target.slot, self.num_tokens, spec.block_bytes)

    def detach(self, table: GroupTable) -> None:
        """Lets the sequence go. What the source stands on stays referenced: a used block's parent cannot be taken."""
        assert self.sequence is not None
        self.sequence.tickets.discard(self)
        self.sequence = None
        for index, block in enumerate(table.blocks[: self.index]):
            standing = table.anchors.get(index, block)
            if standing is not None:
                self.pool.retain(standing)
                self.anchors.append(standing)

    def end(self) -> None:
        """Gives up everything that it reserves."""
        for block in (self.target, self.source, *reversed(self.anchors)):
            self.pool.drop(block)
        if self.sequence is not None:
            self.sequence.tickets.discard(self)
