"""Operators' settings in Redis: rules, quotas, shares of pools, and pins. Changes are written in the background."""

from collections.abc import Container, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from cachemgr.operators.operator_journal import Entry, Kind, entry_name
from cachemgr.persistence.consistency import Difference, compare_entries
from cachemgr.persistence.lease_clock import StoreClocks, pin_with_end_time
from cachemgr.persistence.marked_writes import MarkedWrites
from cachemgr.persistence.pending_changes import Hash, PendingEntries
from cachemgr.persistence.records import RecordError, decode_entry, encode_entry, to_message
from cachemgr.persistence.redis_keys import Keys
from cachemgr.persistence.restoring import Restoring
from cachemgr.queries import Queries
from cachemgr.types import PinRecord
from protos.kvcache.v1 import kvcache_pb2 as pb

_CHUNK = 64
_SHARED = (Kind.RULE, Kind.QUOTA, Kind.SHARE)

log = structlog.get_logger()


class OperatorStore:
    """Writes entries that have changed to Redis on request.

    The caller must read Redis before the first write, so that no stored entry is lost. Entries that have changed since
    the start are newer and win; all other entries are handed to `calls`.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        clocks: StoreClocks,
        writes: MarkedWrites,
        queue: PendingEntries,
        source: Queries,
        calls: Restoring,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._source = source
        self._calls = calls
        self._clocks = clocks
        self._writes = writes
        self._queue = queue
        self._was_read = False

    def rewrite_shared(self) -> None:
        """Has all rules, quotas and shares rewritten. Does nothing before `read`, because Redis may hold more."""
        if self._was_read:
            for kind in _SHARED:
                self._queue.rewrite(kind)

    async def read(self) -> None:
        """Passes stored rules, quotas and shares without pending changes to the manager. Raises UNAVAILABLE.

        Does nothing after the first success. No await separates the check for pending changes from the call of
        `restore_operators`, so that no newer change is overwritten.
        """
        if self._was_read:
            return
        found = [(kind, await self.stored(kind)) for kind in _SHARED]
        stored = pb.StoredOperators()
        fields: dict[Kind, Any] = {
            Kind.RULE: stored.rules,
            Kind.QUOTA: stored.quotas,
            Kind.SHARE: stored.shares,
        }
        for kind, entries in found:
            fields[kind].extend(
                to_message(entry) for entry in entries if not self._queue.is_pending(kind, entry_name(entry))
            )
        self._was_read = True
        if stored.ListFields():
            self._calls.restore_operators(stored)
            log.info("operators' settings restored", **{kind.value: len(field) for kind, field in fields.items()})

    async def stored_pins(self, executor_id: str) -> list[PinRecord]:
        """An executor's pins as stored in Redis. Raises UNAVAILABLE."""
        entries = await self.stored(Kind.PIN, executor_id)
        return [entry for entry in entries if isinstance(entry, PinRecord)]

    async def stored(self, kind: Kind, executor_id: str = "") -> list[Entry]:
        """The entries of a hash; pins have their end time, not their remaining time. Raises UNAVAILABLE."""
        # A hash that grows during the scan may return an entry twice.
        found: dict[str, Entry] = {}
        unreadable = 0
        async for field, value in self._redis.hscan_iter(self._key(kind, executor_id), count=_CHUNK):
            try:
                name = field.decode()
                found[name] = decode_entry(kind, name, value)
            except (RecordError, UnicodeDecodeError):
                unreadable += 1
        if unreadable:
            log.warning("operators' records that cannot be read are ignored", what=kind.value, entries=unreadable)
        return list(found.values())

    async def compare(self, executor_ids: Iterable[str]) -> list[Difference]:
        """Differences between Redis and the manager; of pins, only these executors' pins. Raises UNAVAILABLE."""
        found = []
        for kind, executor_id in [*((kind, "") for kind in _SHARED), *((Kind.PIN, one) for one in executor_ids)]:
            stored = await self.stored(kind, executor_id)
            entries = self._source.entries(kind, executor_id)
            present = [self._with_end_time(entry, executor_id) for entry in entries]
            is_pending = partial(self._queue.is_pending, kind, executor_id=executor_id)
            found += compare_entries(kind.value, stored, present, is_pending, executor_id)
        return found

    async def write(self, *, pins: bool, unread: Container[str] = ()) -> None:
        """Writes changes to Redis: of pins with `pins`, otherwise of rules, quotas and shares. Raises UNAVAILABLE.

        Changes that were not written stay queued, as do changes of `unread` executors.
        """
        for hash_ in self._queue.hashes:
            if (hash_[0] is Kind.PIN) is pins and hash_[1] not in unread:
                await self._write(hash_)

    async def _write(self, hash_: Hash) -> None:
        kind, executor_id = hash_
        changed = self._queue.take(hash_)
        whole = changed is None
        if changed is None:
            changed = [entry_name(entry) for entry in self._source.entries(kind, executor_id)]
        names = changed
        try:
            for chunk in _chunks(names):
                await self._write_chunk(hash_, chunk, clear=whole)
                whole = False
                del names[: len(chunk)]
        except BaseException:
            if whole:
                self._queue.rewrite(kind, executor_id)
            else:
                self._queue.requeue(hash_, names)
            raise

    async def _write_chunk(self, hash_: Hash, names: list[str], *, clear: bool) -> None:
        (kind, executor_id), key = hash_, self._key(*hash_)

        def fill(pipeline: Pipeline) -> None:
            if clear:
                pipeline.delete(key)
            for name in names:
                entry = self._source.entry(kind, name, executor_id)
                if entry is None:
                    pipeline.hdel(key, name)
                else:
                    pipeline.hset(key, name, encode_entry(self._with_end_time(entry, executor_id)))

        await self._writes.write([executor_id], fill)

    def _with_end_time(self, entry: Entry, executor_id: str) -> Entry:
        return pin_with_end_time(entry, self._clocks.time(executor_id)) if isinstance(entry, PinRecord) else entry

    def _key(self, kind: Kind, executor_id: str) -> str:
        return self._keys.executor(executor_id, kind.value) if kind is Kind.PIN else self._keys.operators(kind.value)


def _chunks(names: list[str]) -> Iterator[list[str]]:
    """Yields at least one chunk, perhaps empty, since a hash is cleared even if nothing is added."""
    rest = iter(list(names))
    yield list(islice(rest, _CHUNK))
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
