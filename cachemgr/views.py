"""What operators, watchers and the store read of a manager. Nothing here changes anything."""

from collections.abc import Iterator

from cachemgr.api import BlockView, Event, PoolView, PoolViolation, SequenceView, Snapshot
from cachemgr.check import check
from cachemgr.errors import UnknownPoolError
from cachemgr.events import EventLog
from cachemgr.pool import Pool
from cachemgr.records import BlockRecord
from cachemgr.registry import Executor
from cachemgr.sequence import Sequence


class ManagerViews:
    """The reading half of the cache manager; the other half owns the fields."""

    _events: EventLog
    _executors: dict[str, Executor]
    _sequences: dict[str, Sequence]

    def check_pool(self, pool_id: str = "") -> list[PoolViolation]:
        """Recounts a pool, or all of them, from scratch. Raises UnknownPoolError."""
        pools = self._selected(pool_id)
        return [violation for executor in self._executors.values() for violation in check(executor, pools)]

    def pools(self) -> list[PoolView]:
        """All pools by name."""
        return [pool.pool_view() for pool in self._selected("")]

    def pool(self, pool_id: str) -> PoolView:
        """One pool. Raises UnknownPoolError."""
        return self._pool(pool_id).pool_view()

    def blocks(self, pool_id: str, after_slot: int = 0) -> Iterator[BlockView]:
        """Used and cached blocks by slot. Raises UnknownPoolError."""
        pool = self._pool(pool_id)
        return (pool.view(block) for block in pool.blocks[after_slot + 1 :] if block is not None)

    def sequences(self, after_handle: int = 0) -> Iterator[SequenceView]:
        """Live sequences by handle."""
        for sequence in list(self._sequences.values()):
            if sequence.handle > after_handle:
                yield sequence.view()

    def records(self, executor_id: str) -> Iterator[BlockRecord]:
        """Every indexed block of an executor, parents before children; nothing for an unknown one."""
        executor = self._executors.get(executor_id)
        for pool in executor.pools if executor is not None else ():
            yield from pool.records()

    @property
    def last_event(self) -> int:
        """Number of the newest event, 0 before the first."""
        return self._events.last

    def snapshot(self) -> Snapshot:
        """The cache at `last_event`."""
        return self._events.snapshot(change for pool in self._selected("") for change in pool.state())

    def events_after(self, number: int, limit: int = 1000) -> list[Event]:
        """Events number+1, number+2, … as many as there are. Raises EventsGoneError."""
        return self._events.after(number, limit)

    def _selected(self, pool_id: str) -> list[Pool]:
        if pool_id:
            return [self._pool(pool_id)]
        return sorted(
            (pool for executor in self._executors.values() for pool in executor.pools), key=lambda pool: pool.pool_id
        )

    def _pool(self, pool_id: str) -> Pool:
        for executor in self._executors.values():
            for pool in executor.pools:
                if pool.pool_id == pool_id:
                    return pool
        raise UnknownPoolError(f"no pool {pool_id}", fields={"pool_id": "is not known"})
