"""What operators said, in Redis: rules, quotas, shares of pools, and pins. Written behind, read before all else."""

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Protocol

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from cachemgr.blocks.block_record import RecordError
from cachemgr.operators.operator_journal import Entry, Kind, entry_name
from cachemgr.persistence.consistency import Difference, compare_entries
from cachemgr.persistence.lease_clock import StoreClocks, pin_at_rest
from cachemgr.persistence.loss_detection import MarkedWrites
from cachemgr.persistence.operator_records import decode, encode, to_message
from cachemgr.persistence.redis_client import executor_key, operators_key
from cachemgr.types import PinRecord
from protos.kvcache.v1 import kvcache_pb2 as pb

_CHUNK = 64
_SHARED = (Kind.RULE, Kind.QUOTA, Kind.SHARE)
# A hash: its kind, and for pins the executor.
Hash = tuple[Kind, str]

log = structlog.get_logger()


class OperatorSource(Protocol):
    """The truth that is copied."""

    def entries(self, kind: Kind, executor_id: str = "") -> Iterable[Entry]:
        """All entries of a hash."""

    def entry(self, kind: Kind, name: str, executor_id: str = "") -> Entry | None:
        """One of them."""


class OperatorStore:
    """Remembers which entries have changed, and brings them to Redis when it is told to.

    As long as Redis was not read nothing of what it may hold is written over unread: entries that have changed since
    the start are newer and win, and all others are handed to `restore`. Beyond `bound` changed entries a hash is
    written as a whole.
    """

    def __init__(
        self,
        redis: Redis,
        clocks: StoreClocks,
        writes: MarkedWrites,
        bound: int,
        source: Callable[[], OperatorSource] | None,
        restore: Callable[[pb.RememberedOperators], None] | None,
    ) -> None:
        self._redis = redis
        self._source = source
        self._restore = restore or (lambda _: None)
        self._clocks = clocks
        self._writes = writes
        self._bound = bound
        self._was_read = False
        self._changed: dict[Hash, dict[str, None]] = {}
        self._whole: set[Hash] = set()

    @property
    def pending(self) -> int:
        """Entries whose change is not in Redis yet."""
        return sum(map(len, self._changed.values()))

    def changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """An entry is new, another, or gone."""
        self._changed.setdefault((kind, executor_id), {})[name] = None
        if self.pending > self._bound:
            self.rewrite(kind, executor_id)

    def rewrite(self, kind: Kind, executor_id: str = "") -> None:
        """Whatever Redis holds gives way to what is, soon."""
        self._changed.pop((kind, executor_id), None)
        self._whole.add((kind, executor_id))

    def rewrite_shared(self) -> None:
        """The same for all that belongs to no executor, unless Redis was not read yet: it may hold more."""
        if self._was_read:
            for kind in _SHARED:
                self.rewrite(kind)

    def is_pending(self, kind: Kind, name: str, executor_id: str = "") -> bool:
        """Whether Redis need not have the present state of an entry."""
        return name in self._changed.get((kind, executor_id), ()) or (kind, executor_id) in self._whole

    async def read(self) -> None:
        """Hands what Redis knows and nobody has changed since to the manager; only the first time. Raises UNAVAILABLE.

        Without an await between the last look at what has changed and the call of `restore`.
        """
        if self._was_read:
            return
        found = [(kind, await self.stored(kind)) for kind in _SHARED]
        remembered = pb.RememberedOperators()
        fields: dict[Kind, Any] = {
            Kind.RULE: remembered.rules,
            Kind.QUOTA: remembered.quotas,
            Kind.SHARE: remembered.shares,
        }
        for kind, entries in found:
            fields[kind].extend(to_message(entry) for entry in entries if not self.is_pending(kind, entry_name(entry)))
        self._was_read = True
        if remembered.ListFields():
            self._restore(remembered)
            log.info("operators' settings are back", **{kind.value: len(field) for kind, field in fields.items()})

    async def stored_pins(self, executor_id: str) -> list[PinRecord]:
        """An executor's pins as they lie in Redis. Raises UNAVAILABLE."""
        entries = await self.stored(Kind.PIN, executor_id)
        return [entry for entry in entries if isinstance(entry, PinRecord)]

    async def stored(self, kind: Kind, executor_id: str = "") -> list[Entry]:
        """What a hash holds; of pins what remains is not worked out. Raises UNAVAILABLE."""
        # A hash that grows meanwhile may tell an entry twice.
        found: dict[str, Entry] = {}
        unreadable = 0
        async for field, value in self._redis.hscan_iter(_key(kind, executor_id), count=_CHUNK):
            try:
                name = field.decode()
                found[name] = decode(kind, name, value)
            except (RecordError, UnicodeDecodeError):
                unreadable += 1
        if unreadable:
            log.warning("left out what another version wrote", what=kind.value, entries=unreadable)
        return list(found.values())

    async def compare(self, executor_ids: Iterable[str]) -> list[Difference]:
        """Where Redis disagrees with what is, of pins those of these executors. Raises UNAVAILABLE."""
        found = []
        for kind, executor_id in [*((kind, "") for kind in _SHARED), *((Kind.PIN, one) for one in executor_ids)]:
            stored = await self.stored(kind, executor_id)
            entries = () if self._source is None else self._source().entries(kind, executor_id)
            present = [self._at_rest(entry, executor_id) for entry in entries]
            is_pending = partial(self.is_pending, kind, executor_id=executor_id)
            found += compare_entries(kind.value, stored, present, is_pending, executor_id)
        return found

    async def write(self, *, pins: bool, unread: Container[str] = ()) -> None:
        """Brings all changes to Redis, of pins or of everything else. Raises UNAVAILABLE; then nothing is forgotten.

        Those of `unread` executors wait.
        """
        for hash_ in {**dict.fromkeys(self._whole), **self._changed}:
            if (hash_[0] is Kind.PIN) is pins and hash_[1] not in unread:
                await self._write(hash_)

    async def _write(self, hash_: Hash) -> None:
        kind, executor_id = hash_
        whole = hash_ in self._whole
        self._whole.discard(hash_)
        names = list(self._changed.pop(hash_, ()))
        if whole:
            entries = () if self._source is None else self._source().entries(kind, executor_id)
            names = [entry_name(entry) for entry in entries]
        try:
            for chunk in _chunks(names):
                await self._write_chunk(hash_, chunk, clear=whole)
                whole = False
                del names[: len(chunk)]
        except BaseException:
            if whole:
                self.rewrite(kind, executor_id)
            else:
                self._changed[hash_] = {**dict.fromkeys(names), **self._changed.get(hash_, {})}
            raise

    async def _write_chunk(self, hash_: Hash, names: list[str], *, clear: bool) -> None:
        (kind, executor_id), key = hash_, _key(*hash_)

        def fill(pipeline: Pipeline) -> None:
            if clear:
                pipeline.delete(key)
            for name in names:
                entry = None if self._source is None else self._source().entry(kind, name, executor_id)
                if entry is None:
                    pipeline.hdel(key, name)
                else:
                    pipeline.hset(key, name, encode(self._at_rest(entry, executor_id)))

        await self._writes.write([executor_id], fill)

    def _at_rest(self, entry: Entry, executor_id: str) -> Entry:
        return pin_at_rest(entry, self._clocks.time(executor_id)) if isinstance(entry, PinRecord) else entry


def _key(kind: Kind, executor_id: str) -> str:
    return executor_key(executor_id, kind.value) if kind is Kind.PIN else operators_key(kind.value)


def _chunks(names: list[str]) -> Iterator[list[str]]:
    """At least one, which may be empty: a hash is cleared also when nothing comes into it."""
    rest = iter(list(names))
    yield list(islice(rest, _CHUNK))
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
