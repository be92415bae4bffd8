"""Open copies between tiers: their tickets, copies that may still be recalled, and prefetches."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from cachemgr.blocks.block import Block, account_of
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.types import RemovalCause, Transfer

if TYPE_CHECKING:
    from cachemgr.blocks.block import Account
    from cachemgr.blocks.tier import Tier
    from cachemgr.sequences.clients import Scheduler
    from cachemgr.sequences.sequence import GroupTable, Sequence


class Purpose(enum.Enum):
    # Copies all or the beginning of a cached block, or of a fork's parent's block, into a block of a sequence.
    ONLOAD = "onload"
    # Copies to a lower tier; the source is the block that has the slot now.
    OFFLOAD = "offload"
    # Copies to the device before a sequence needs the block.
    PREFETCH = "prefetch"
    # Has no source: the target is overwritten.
    ZERO = "zero"
    # Has no source: overwrites a slot that its pool may no longer use.
    CLEAR = "clear"
    # Copies a device block to a lower tier without a reference to the source. The source becomes None once the block
    # has left the device or the tree, so that the copy is useless.
    WRITE_THROUGH = "write_through"


# Looked up once for speed: there may be very many copies.
_ONLOAD, _OFFLOAD, _PREFETCH = Purpose.ONLOAD, Purpose.OFFLOAD, Purpose.PREFETCH


class Outcome(enum.Enum):
    """How a copy ended. A cancelled copy was never sent to the executor, or its scheduler was lost."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """One open copy. It takes over a reference to its target and, with `holds_source`, a reference to its source.

    The source of an offload is the block that has the slot now. While a sequence has the source, the copy needs no
    reference, as the sequence runs the copy before it computes. When the source would become empty, the copy gets a
    reference (`holds_source`). Without a scheduler, the executor receives the copy with its next renewal.
    """

    number: int
    purpose: Purpose
    pool: BlockPool
    source: Block | None
    target: Block
    num_tokens: int = 0
    scheduler: Scheduler | None = None
    holds_source: bool = False
    sequence: Sequence | None = None
    # Set as long as the copy may still be recalled.
    opened_by: OpenedCopies | None = None
    # Index of the target in the table of the sequence.
    index: int = 0
    held_ancestors: list[Block] = field(default_factory=list)
    prefetch: Prefetch | None = None
    transfer: Transfer = field(init=False)

    def __post_init__(self) -> None:
        self.holds_source = self.purpose is _ONLOAD or self.purpose is _PREFETCH
        self.transfer = self._transfer()

    def _transfer(self) -> Transfer:
        pool, source = self.pool, self.source
        spec, slot, to = pool.spec, self.target.index, pool.tier_of(self.target)
        to.fill(slot, self.number)
        origin = to if source is None else pool.tier_of(source)
        # Takes half the time of Transfer(...).
        return tuple.__new__(
            Transfer,
            (
                self.number,
                spec.group,
                0 if source is None else source.index - origin.offset,
                slot - to.offset,
                self.num_tokens or pool.block_size,
                spec.block_bytes,
                origin.kind,
                to.kind,
            ),
        )

    @property
    def together(self) -> list[Ticket]:
        """The copies that release their blocks together: all copies of its prefetch, or only this copy."""
        return [self] if self.prefetch is None else self.prefetch.tickets

    def offer(self) -> None:
        """Notes that the offloaded block may have moved in the eviction order."""
        if self.opened_by is not None:
            self.opened_by.offer(self)

    def detach(self, table: GroupTable) -> None:
        """Separates the copy from its sequence. The ancestors of a device source stay referenced."""
        assert self.sequence is not None
        assert self.source is not None
        self.sequence.tickets.discard(self)
        self.sequence = None
        if self.pool.tier_of(self.source) is not self.pool.device:
            return
        for index, block in enumerate(table.blocks[: self.index]):
            standing = table.duplicate_refs.get(index, block)
            if standing is not None:
                self.pool.acquire(standing)
                self.held_ancestors.append(standing)

    def end(self, outcome: Outcome) -> None:
        """Ends the copy and releases its blocks; a block whose bytes were not copied is lost."""
        if self.sequence is not None:
            self.sequence.tickets.discard(self)
        if outcome is Outcome.FAILED:
            self.pool.tier_of(self.source or self.target).counters.failed_copies += 1
        if self.purpose is Purpose.OFFLOAD:
            self.pool.offloader.ended(self)
            if outcome is Outcome.DONE:
                self.pool.offloader.drained(self.target)
            else:
                self._lose(self.target)
        elif self.purpose is Purpose.WRITE_THROUGH:
            self.pool.write_through.ended(self, done=outcome is Outcome.DONE)
        elif self.purpose is Purpose.ZERO and outcome is not Outcome.DONE:
            # Overwriting is requested again.
            self.pool.zero_on_free.add(self.target)
        elif self.purpose is Purpose.CLEAR:
            self.pool.cleared(self.target.index, done=outcome is Outcome.DONE)
            return
        elif self.purpose is Purpose.ONLOAD and outcome is Outcome.FAILED and self._is_below(self.source):
            self._lose(self.source)
        if self.prefetch is not None:
            self.prefetch.ended(self, failed=outcome is not Outcome.DONE)
            return
        self.give_up()

    def give_up(self) -> None:
        if self.holds_source and self.source in self.pool.zero_on_free and self.target.parent is None:
            # Bytes that were forgotten during the copy may have been copied to the target.
            self.pool.zero_on_free.add(self.target)
        self.pool.release(self.target)
        if self.source is not None and self.holds_source:
            self.pool.release(self.source)
        for block in reversed(self.held_ancestors):
            self.pool.release(block)

    def lose_source(self) -> None:
        """Drops a source whose bytes cannot be read."""
        self._lose(self.source)

    def _is_below(self, block: Block | None) -> bool:
        return block is not None and self.pool.tier_of(block) is not self.pool.device

    def _lose(self, block: Block | None) -> None:
        if block is None:
            return
        self.pool.write_through.reject(block)
        if block.parent is not None:
            self.pool.discard_subtree(block, RemovalCause.COPY_FAILED)


class Tickets(dict[int, Ticket]):
    """The open copies of an executor by their numbers. `next_number` never gives a number twice."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        self._next_number = next_number

    def open(
        self,
        purpose: Purpose,
        pool: BlockPool,
        source: Block | None,
        target: Block,
        num_tokens: int = 0,
        scheduler: Scheduler | None = None,
    ) -> Ticket:
        """Opens a copy. `num_tokens` is 0 if all bytes of a block are copied."""
        ticket = Ticket(self._next_number(), purpose, pool, source, target, num_tokens, scheduler)
        self[ticket.number] = ticket
        return ticket


class OpenedCopies:
    """The copies for a sequence that no scheduler has received yet, in order.

    Until then, a lower tier may evict the block of an offload, which recalls the copy. Each tier has a heap of victims,
    since a long prompt opens a copy for each of its blocks when all tiers are full.
    """

    __slots__ = ("_heaps", "_tickets")

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        # By tier and account (None: all blocks): (priority, recency, number, ticket). An entry is stale once its block
        # has a child in its tier, has stopped moving, or has a new priority; `offer` then adds a new entry.
        self._heaps: dict[tuple[Tier, Account | None], list[tuple[int, int, int, Ticket]]] = {}

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def add(self, ticket: Ticket) -> None:
        """Adds a copy that has just been opened."""
        self._tickets[ticket.number] = ticket
        if ticket.purpose is _OFFLOAD:
            ticket.opened_by = self
            self.offer(ticket)

    def offer(self, ticket: Ticket) -> None:
        """Notes that the offloaded block may have become evictable, or may have moved in the eviction order."""
        block = ticket.target
        if block.children_in_tier:
            return
        tier, account = ticket.pool.tier_of(block), account_of(block)
        entry = (block.priority, block.recency, ticket.number, ticket)
        heappush(self._heaps.setdefault((tier, None), []), entry)
        if account is not None:
            heappush(self._heaps.setdefault((tier, account), []), entry)

    def first(self, tier: Tier, account: Account | None) -> Block | None:
        """The offloaded block that a tier evicts first, of one account or of all."""
        heap = self._heaps.get((tier, account))
        while heap:
            priority, _, _, ticket = heap[0]
            block = ticket.target
            moving = ticket.opened_by is self and block in ticket.pool.offloader.offloading
            if moving and block.parent is not None and not block.children_in_tier and block.priority == priority:
                return block
            heappop(heap)
        return None

    def recall(self, ticket: Ticket) -> None:
        """Withdraws a copy, which then will not run."""
        del self._tickets[ticket.number]
        ticket.opened_by = None

    def take(self) -> tuple[Transfer, ...]:
        """Hands out the copies in the order in which to send them. From now on, none can be recalled."""
        transfers = tuple([ticket.transfer for ticket in self._tickets.values()])
        self.clear()
        return transfers

    def clear(self) -> None:
        for ticket in self._tickets.values():
            ticket.opened_by = None
        self._tickets.clear()
        self._heaps.clear()


class Prefetch:
    """Copies of a chain to the device. After the last copy, all blocks before the first failure are replaced."""

    def __init__(self, pool: BlockPool, tickets: list[Ticket]) -> None:
        self._pool = pool
        self.tickets = tickets
        self._open = len(tickets)
        self._failed: set[Ticket] = set()
        for ticket in tickets:
            ticket.prefetch = self

    def ended(self, ticket: Ticket, *, failed: bool) -> None:
        self._open -= 1
        if failed:
            self._failed.add(ticket)
        if self._open:
            return
        good = True
        for ticket in self.tickets:
            source = ticket.source
            assert source is not None
            good = good and ticket not in self._failed
            if self._pool.tree.by_key.get(source.key) is not source:
                continue
            parent = source.parent
            good = good and (
                not isinstance(parent, Block) or self._pool.window is not None or self._pool.is_on_device(parent)
            )
            if good:
                self._pool.supersede(ticket.target, source, 0)
        for ticket in self.tickets:
            if ticket in self._failed:
                ticket.lose_source()
        for ticket in reversed(self.tickets):
            ticket.give_up()
