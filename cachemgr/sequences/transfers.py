"""Opens copies, including copies that the pools of an executor request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.blocks.block import Block, Writer
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.sequences.clients import Executor
from cachemgr.sequences.copies import Prefetch, Purpose, Ticket, Tickets
from cachemgr.sequences.holds import Holds
from cachemgr.sequences.sequence import Sequence
from cachemgr.types import Transfer

if TYPE_CHECKING:
    from cachemgr.blocks.offload import CopyTicket

# The limit on open write-through copies over all pools of an executor.
MAX_WRITE_THROUGH_COPIES = 64


class PoolFollower:
    """The listener of an executor's pools, which opens their copies. All writers of blocks are sequences."""

    def __init__(self, tickets: Tickets, holds: Holds) -> None:
        self._tickets = tickets
        self._holds = holds

    def offloading(self, pool: BlockPool, block: Block, occupant: Block, writer: Writer | None) -> Ticket:
        """Opens the copy of a block that is evicted, for a sequence or none; `occupant` has the block's old slot."""
        assert writer is None or isinstance(writer, Sequence)
        scheduler = None if writer is None else writer.scheduler
        ticket = self._tickets.open(Purpose.OFFLOAD, pool, occupant, block, scheduler=scheduler)
        if writer is not None:
            writer.opened.add(ticket)
        return ticket

    def offload_recalled(self, ticket: CopyTicket, writer: Writer) -> None:
        """Cancels an offload that was not sent."""
        assert isinstance(writer, Sequence)
        writer.opened.recall(self._tickets.pop(ticket.number))

    def zeroing(self, pool: BlockPool, block: Block) -> None:
        """Opens the copy that overwrites a slot before the slot becomes empty."""
        self._tickets.open(Purpose.ZERO, pool, None, block)

    def withheld(self, pool: BlockPool, block: Block) -> None:
        """Opens the copy that overwrites a slot before other pools may use its memory."""
        self._tickets.open(Purpose.CLEAR, pool, None, block)

    def superseded(self, pool: BlockPool, old: Block, block: Block) -> None:
        """Notes that a device block replaces an equal block in the index, and gets its children."""
        if not old.refs:
            return
        self._holds.replace(pool, old, block)
        for ticket in self._tickets.values():
            if ticket.source is old and ticket.sequence is not None and not ticket.num_tokens:
                # The sequence makes its own copy of the lower block, and may share later blocks that others compute.
                ticket.sequence.tables[pool.spec.group].refer_to_duplicate(ticket.index, block)


def onload(sequence: Sequence, pool: BlockPool, source: Block, target: Block, index: int, num_tokens: int) -> None:
    """Copies a source into a block of a sequence. The copy takes over the source's reference."""
    pool.acquire(target)
    ticket = sequence.executor.tickets.open(Purpose.ONLOAD, pool, source, target, num_tokens, sequence.scheduler)
    ticket.sequence, ticket.index = sequence, index
    sequence.tickets.add(ticket)
    sequence.opened.add(ticket)
    tier = pool.tier_of(source)
    if tier is not pool.device:
        tier.counters.onloaded += 1
        tier.counters.copied_bytes += pool.spec.block_bytes


def open_write_through_copies(executor: Executor) -> None:
    """Begins copies of device blocks to empty lower slots; the executor receives the copies with its next renewal."""
    for pool in executor.pools:
        write_through, tier = pool.write_through, pool.write_through.tier
        for block in write_through.next(MAX_WRITE_THROUGH_COPIES // len(executor.pools) - write_through.running):
            assert tier is not None
            target = Block(tier.take_empty())
            target.refs = 1
            pool.blocks[target.index] = target
            tier.used += 1
            write_through.begun(executor.tickets.open(Purpose.WRITE_THROUGH, pool, block, target))
            pool.device.counters.copied_bytes += pool.spec.block_bytes


def prefetch(executor: Executor, pool: BlockPool, chain: list[Block]) -> list[Transfer]:
    """Prefetches blocks of a chain, parents first, until no block is free or a block has an open copy."""
    here = [block for block in chain if pool.is_on_device(block)]
    below = [block for block in chain if not pool.is_on_device(block)]
    free = pool.device.free_for(None, claimed=[block for block in here if not block.refs])
    on_the_way = {ticket.source for ticket in executor.tickets.values() if ticket.purpose is Purpose.PREFETCH}
    sources: list[Block] = []
    for source in below[: max(0, free)]:
        if source in pool.offloader.offloading or source in on_the_way:
            break
        sources.append(source)
    if not sources:
        return []
    for block in (*here, *sources):
        pool.acquire(block)
    tickets = []
    for source in sources:
        tier = pool.tier_of(source)
        tier.counters.onloaded += 1
        tier.counters.copied_bytes += pool.spec.block_bytes
        target = pool.allocate(None)
        tickets.append(executor.tickets.open(Purpose.PREFETCH, pool, source, target))
    # Device blocks of the chain stay until their children are on the device.
    tickets[0].held_ancestors = here
    Prefetch(pool, tickets)
    return [ticket.transfer for ticket in tickets]
