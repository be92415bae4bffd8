"""A consumer of events: what it knows is what the cache holds, whatever happens."""

from cachemgr.errors import EventsGoneError
from cachemgr.manager import CacheManager
from cachemgr.types import EventKind, TierKind


class Watcher:
    """Follows one manager, and begins anew with a snapshot when it is another one or was too slow."""

    def __init__(self) -> None:
        self._manager: CacheManager | None = None
        self._seen = 0
        # Indexed blocks by pool and key: where they are.
        self._known: dict[tuple[str, bytes], tuple[TierKind, int]] = {}

    def check(self, manager: CacheManager) -> None:
        """Takes all events, and compares what they come to."""
        try:
            if manager is not self._manager:
                raise EventsGoneError("another manager")
            self._follow(manager.queries.events_after(self._seen, limit=1_000_000))
        except EventsGoneError:
            self._manager, self._known = manager, {}
            self._follow(manager.queries.snapshot().events)
        self._seen = manager.queries.last_event
        there = {}
        for pool in manager.queries.pools():
            for _, view in manager.queries.blocks(pool.pool_id):
                if view.key:
                    there[pool.pool_id, view.key] = (view.tier, view.slot)
        assert self._known == there

    def _follow(self, events) -> None:
        for event in events:
            name = (event.block.pool_id, event.block.key)
            if event.kind is EventKind.REMOVED:
                del self._known[name]
            elif event.kind is EventKind.STORED:
                assert name not in self._known
                self._known[name] = (event.block.tier, event.block.slot)
            elif event.kind is EventKind.UPDATED:
                assert name in self._known
                self._known[name] = (event.block.tier, event.block.slot)
