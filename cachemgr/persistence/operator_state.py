"""What operators said, in Redis: rules, quotas, shares of pools, and pins. Written behind, read before all else.

A value is a byte with the version, and a message of kvcache.proto. Times of pins are those of the executor's clock, as
in `cachemgr/persistence/lease_clock.py`.
"""

import re
from collections.abc import Container, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import structlog
from google.protobuf.message import DecodeError, Message
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from cachemgr.blocks.block_record import RecordError
from cachemgr.operators.operator_journal import Entry, Kind, entry_name
from cachemgr.persistence.consistency import Difference, compare_entries
from cachemgr.persistence.lease_clock import StoreClocks, pin_at_rest
from cachemgr.persistence.loss_detection import MarkedWrites
from cachemgr.persistence.ports import Restoring, Source
from cachemgr.persistence.redis_client import executor_key, operators_key
from cachemgr.persistence.write_queue import EntryQueue, Hash
from cachemgr.retention.rules import check_spec
from cachemgr.types import PinRecord, PoolShare, Quota, RetentionRule, RuleAction, RuleMatch
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.eviction_message import EvictionPolicyRequest
from protos.rpc.durations import duration, seconds

_VERSION = b"\x01"
_DIGEST_BYTES = 32
_PIN_NAME = re.compile(r"pin-[0-9]{1,19}")
_CHUNK = 64
_SHARED = (Kind.RULE, Kind.QUOTA, Kind.SHARE)

log = structlog.get_logger()


class OperatorStore:
    """Brings entries that have changed to Redis when it is told to.

    As long as Redis was not read nothing of what it may hold is written over unread: entries that have changed since
    the start are newer and win, and all others are handed to `calls`.
    """

    def __init__(
        self,
        redis: Redis,
        clocks: StoreClocks,
        writes: MarkedWrites,
        queue: EntryQueue,
        source: Source,
        calls: Restoring,
    ) -> None:
        self._redis = redis
        self._source = source
        self._calls = calls
        self._clocks = clocks
        self._writes = writes
        self._queue = queue
        self._was_read = False

    def rewrite_shared(self) -> None:
        """All that belongs to no executor is written as a whole, unless Redis was not read yet: it may hold more."""
        if self._was_read:
            for kind in _SHARED:
                self._queue.rewrite(kind)

    async def read(self) -> None:
        """Hands what Redis knows and nobody has changed since to the manager; only the first time. Raises UNAVAILABLE.

        Without an await between the last look at what has changed and the call.
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
            fields[kind].extend(
                to_message(entry) for entry in entries if not self._queue.is_pending(kind, entry_name(entry))
            )
        self._was_read = True
        if remembered.ListFields():
            self._calls.restore_operators(remembered)
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
            entries = self._source.entries(kind, executor_id)
            present = [self._at_rest(entry, executor_id) for entry in entries]
            is_pending = partial(self._queue.is_pending, kind, executor_id=executor_id)
            found += compare_entries(kind.value, stored, present, is_pending, executor_id)
        return found

    async def write(self, *, pins: bool, unread: Container[str] = ()) -> None:
        """Brings all changes to Redis, of pins or of everything else. Raises UNAVAILABLE; then nothing is forgotten.

        Those of `unread` executors wait.
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
                self._queue.give_back(hash_, names)
            raise

    async def _write_chunk(self, hash_: Hash, names: list[str], *, clear: bool) -> None:
        (kind, executor_id), key = hash_, _key(*hash_)

        def fill(pipeline: Pipeline) -> None:
            if clear:
                pipeline.delete(key)
            for name in names:
                entry = self._source.entry(kind, name, executor_id)
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


def to_message(entry: Entry) -> Message:
    """As the store keeps it, and the operation log."""
    match entry:
        case RetentionRule():
            return _rule(entry)
        case Quota():
            return quota_message(entry)
        case PoolShare():
            return share_message(entry)
        case PinRecord():
            return pin_message(entry)


def _rule(spec: RetentionRule) -> pb.RetentionRule:
    message = rule_message(spec)
    # What clients are shown ends with microseconds.
    for field, value in (
        ("retention_duration", spec.action.duration),
        ("pin_duration", spec.action.pin_duration),
    ):
        if value is not None:
            getattr(message.action, field).FromNanoseconds(round(value * 1e9))
    return message


def pin_message(record: PinRecord) -> pb.RememberedPin:
    """A pin as a message."""
    return pb.RememberedPin(
        name=record.name,
        owner=record.owner,
        remaining=record.remaining,
        groups=[group for group, _ in record.blocks],
        keys=b"".join(key for _, key in record.blocks),
    )


def pin_of(message: pb.RememberedPin) -> PinRecord:
    """Raises RecordError for one that no manager wrote."""
    keys = [message.keys[start : start + _DIGEST_BYTES] for start in range(0, len(message.keys), _DIGEST_BYTES)]
    if not _PIN_NAME.fullmatch(message.name) or not message.owner:
        raise RecordError("a pin needs a name and an owner")
    if len(message.keys) != _DIGEST_BYTES * len(message.groups):
        raise RecordError("a pin has a group for each key")
    return PinRecord(message.name, message.owner, message.remaining, tuple(zip(message.groups, keys, strict=True)))


def encode(entry: Entry) -> bytes:
    """The hash value of an entry."""
    return _VERSION + to_message(entry).SerializeToString(deterministic=True)


def decode(kind: Kind, name: str, value: bytes) -> Entry:
    """Reads an entry back. Raises RecordError for anything that `encode` did not write under this name."""
    if value[:1] != _VERSION:
        raise RecordError("entry of another version")
    try:
        entry = _decode(kind, value[1:])
    except (DecodeError, ServiceError) as error:
        raise RecordError("entry cannot be read") from error
    if entry_name(entry) != name:
        raise RecordError("entry under another name")
    return entry


def _decode(kind: Kind, data: bytes) -> Entry:
    match kind:
        case Kind.RULE:
            spec = rule_of(pb.RetentionRule.FromString(data))
            check_spec(spec)
            return spec
        case Kind.QUOTA:
            quota = quota_of(pb.Quota.FromString(data))
            if not (quota.tenant_id or quota.salt):
                raise RecordError("a quota without an account")
            return quota
        case Kind.SHARE:
            return share_of(pb.PoolShare.FromString(data))
        case Kind.PIN:
            return pin_of(pb.RememberedPin.FromString(data))


def rule_of(message: pb.RetentionRule) -> RetentionRule:
    """A rule."""
    match, action = message.match, message.action
    floor = action.offload_min_priority if action.HasField("offload_min_priority") else None
    return RetentionRule(
        name=message.name,
        order=message.order,
        match=RuleMatch(
            salt=match.salt if match.HasField("salt") else None,
            tenant_id=match.tenant_id if match.HasField("tenant_id") else None,
            adapter_id=match.adapter_id if match.HasField("adapter_id") else None,
            prefix_token_ids=tuple(match.prefix_token_ids),
            start=match.start,
            end=match.end if match.HasField("end") else None,
        ),
        action=RuleAction(
            priority=action.retention_priority if action.HasField("retention_priority") else None,
            duration=seconds(action.retention_duration) if action.HasField("retention_duration") else None,
            pin_duration=seconds(action.pin_duration) if action.HasField("pin_duration") else None,
            no_store=action.no_store,
            offload_min_priority=floor,
            eviction_policy=EvictionPolicyRequest.of(action.eviction_policy)
            if action.HasField("eviction_policy")
            else None,
        ),
        etag=message.etag,
    )


def rule_message(spec: RetentionRule) -> pb.RetentionRule:
    """A rule as a message."""
    match, action = spec.match, spec.action
    return pb.RetentionRule(
        name=spec.name,
        etag=spec.etag,
        order=spec.order,
        match=pb.RuleMatch(
            salt=match.salt,
            tenant_id=match.tenant_id,
            adapter_id=match.adapter_id,
            prefix_token_ids=match.prefix_token_ids,
            start=match.start or None,
            end=match.end,
        ),
        action=pb.RuleAction(
            retention_priority=action.priority,
            retention_duration=None if action.duration is None else duration(action.duration),
            pin_duration=None if action.pin_duration is None else duration(action.pin_duration),
            no_store=action.no_store,
            offload_min_priority=action.offload_min_priority,
            eviction_policy=None if action.eviction_policy is None else action.eviction_policy.message(),
        ),
    )


def quota_of(message: pb.Quota) -> Quota:
    """A quota."""
    account = message.WhichOneof("account")
    device, host = message.HasField("device_ceiling_blocks"), message.HasField("host_ceiling_blocks")
    return Quota(
        tenant_id=message.tenant_id if account == "tenant_id" else None,
        salt=message.salt if account == "salt" else None,
        device_floor=message.device_floor_blocks,
        device_ceiling=message.device_ceiling_blocks if device else None,
        host_floor=message.host_floor_blocks,
        host_ceiling=message.host_ceiling_blocks if host else None,
    )


def quota_message(spec: Quota) -> pb.Quota:
    """A quota as a message."""
    return pb.Quota(
        tenant_id=spec.tenant_id,
        salt=spec.salt,
        device_floor_blocks=spec.device_floor,
        device_ceiling_blocks=spec.device_ceiling,
        host_floor_blocks=spec.host_floor,
        host_ceiling_blocks=spec.host_ceiling,
    )


def share_of(message: pb.PoolShare) -> PoolShare:
    """An operator's share of a pool."""
    return PoolShare(message.pool_id, message.total_blocks, message.num_blocks, message.share_number)


def share_message(share: PoolShare) -> pb.PoolShare:
    """An operator's share of a pool as a message."""
    return pb.PoolShare(
        pool_id=share.pool_id,
        total_blocks=share.total_blocks,
        num_blocks=share.num_blocks,
        share_number=share.number,
    )
