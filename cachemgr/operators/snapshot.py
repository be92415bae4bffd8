"""A snapshot of the cache at one event number, read while the cache changes: changed blocks are read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.blocks.events import NO_BLOCK, Event, EventLog
from cachemgr.retention.leases import LeaseBook, leases_of
from cachemgr.types import BlockView, EventKind, LeaseView

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor
    from cachemgr.types import ExecutorSpec


class _Seen(NamedTuple):
    view: BlockView
    # Each lease with its deadline; None before the lease's clock starts.
    leases: list[tuple[LeaseView, float | None]]


class SnapshotReader:
    """Reads a snapshot. Every change of a block is an event, or a quiet change of its leases.

    So a reader that rereads changed blocks gets the same result as a reader that reads all blocks at one moment. Only
    reference counts may be older.
    """

    def __init__(self, events: EventLog, leases: LeaseBook, executors: Callable[[], list[Executor]]) -> None:
        """`executors` returns the present executors."""
        self._events = events
        self._leases = leases
        self._executors = executors
        self._specs: list[ExecutorSpec] = []
        self._seen: dict[str, dict[bytes, _Seen]] = {}
        self._now = 0.0
        self.number = events.last
        self._touched: dict[tuple[str, bytes], None] = {}
        events.quiet_listeners.append(self)

    def close(self) -> None:
        """Stops listening for changes."""
        self._events.quiet_listeners.remove(self)

    def changed_quietly(self, pool_id: str, key: bytes) -> None:
        """Notes that a block's leases have changed, so that the block is read again."""
        self._touched[pool_id, key] = None

    def slots(self) -> Iterator[None]:
        """Reads a slot at a time. The cache may change in between: call `catch_up` often, and after the last slot."""
        for pool in [pool for executor in self._executors() for pool in executor.pools]:
            blocks, index = pool.blocks, 0
            while index < len(blocks):
                block = blocks[index]
                if block is not None and block.parent is not None:
                    self._read(pool, block)
                index += 1
                yield
                if pool.blocks is not blocks:
                    # The executor has restarted or is lost, so the blocks of the old list may be gone.
                    blocks, index = pool.blocks, 0

    def catch_up(self) -> None:
        """Reads changed blocks again. Raises EventsGoneError if more has changed than the log keeps."""
        pools = {pool.pool_id: pool for executor in self._executors() for pool in executor.pools}
        self._specs = [executor.spec for executor in self._executors()]
        while self.number < self._events.last:
            for event in self._events.after(self.number, 1000):
                self.number = event.number
                if event.executor is not None and event.kind is EventKind.EXECUTOR_LOST:
                    # Not all blocks of a lost or restarted executor have events.
                    for pool_id in event.executor.pool_ids:
                        self._seen.pop(pool_id, None)
                self._touched[event.block.pool_id, event.block.key] = None
        for pool_id, key in self._touched:
            pool = pools.get(pool_id)
            block = None if pool is None else pool.tree.by_key.get(key)
            if pool is not None and block is not None:
                self._read(pool, block)
            else:
                self._seen.get(pool_id, {}).pop(key, None)
        self._touched.clear()
        self._now = self._leases.now
        self._seen = {pool_id: self._seen.get(pool_id, {}) for pool_id in pools}

    def _read(self, pool: BlockPool, block: Block) -> None:
        leases = [(self._leases.view(lease), lease.deadline) for lease in leases_of(block)]
        self._seen.setdefault(pool.pool_id, {})[block.key] = _Seen(pool.view(block), leases)

    def events(self) -> Iterator[Event | None]:
        """Yields the snapshot at `number`, once: each executor, its pools, and each pool's blocks, parents first.

        Yields None while it sorts.
        """
        for spec in self._specs:
            yield Event(self.number, EventKind.EXECUTOR_REGISTERED, NO_BLOCK, executor=spec)
            for pool_id in spec.pool_ids:
                yield Event(self.number, EventKind.CREATED, BlockView.of_pool(pool_id))
                yield from self._blocks(self._seen.pop(pool_id))

    def _blocks(self, found: dict[bytes, _Seen]) -> Iterator[Event | None]:
        by_depth: dict[int, list[_Seen]] = {}
        # Reversed and taken from the end, since freeing all at once would take long.
        while found:
            _, seen = found.popitem()
            by_depth.setdefault(seen.view.depth, []).append(seen)
            yield None
        for depth in sorted(by_depth):
            rest = by_depth[depth]
            while rest:
                view, leases = rest.pop()
                yield Event(self.number, EventKind.STORED, view)
                for lease, deadline in leases:
                    if deadline is not None:
                        lease = lease._replace(remaining=max(0.0, deadline - self._now))
                    yield Event(self.number, EventKind.LEASE_GRANTED, view, lease=lease)
