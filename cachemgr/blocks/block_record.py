"""How an indexed block is written to Redis: little-endian, binary-safe, versioned, no pickle."""

import math
import struct
from typing import NamedTuple

from cachemgr.blocks.block_keys import TOKEN_BYTES, unpack
from cachemgr.types import TierKind

_VERSION = 5
# version, flags, depth, stored step, generation, last use, number of tokens, number of leases, extra bytes, bytes of
# tenant and session
_HEAD = struct.Struct("<BBIQQqIIIHH")
# Of version 4, which is read as well: it counts fewer leases.
_HEAD_4 = struct.Struct("<BBIQQqIHIHH")
# priority, duration, remaining time (each NaN for none), least priority to be moved (-1), bytes of the holder's name
_LEASE = struct.Struct("<bddbH")
# group, tier, slot
_PLACE = struct.Struct("<IBI")
# tier, slot, generation
_BACKUP = struct.Struct("<BIQ")
_HAS_PARENT, _HAS_SALT, _HAS_ADAPTER, _HAS_TENANT, _HAS_SESSION, _HAS_BACKUP = 1, 2, 4, 8, 16, 32
_DIGEST_BYTES = 32
# `last_use` of all blocks of the device, which are not written again for every use.
USED_LAST = (1 << 63) - 1


class RecordError(ValueError):
    """Bytes in Redis are no record of this version; whoever reads them leaves them out."""


class LeaseRecord(NamedTuple):
    """A lease; `remaining` seconds, None when its clock has not started or there is none."""

    holder: str
    priority: int
    duration: float | None
    remaining: float | None
    offload_min_priority: int | None = None


class BackupRecord(NamedTuple):
    """A slot of a lower tier that holds what a block of the device does, and the ticket of the copy that filled it."""

    tier: TierKind
    slot: int
    generation: int


class BlockRecord(NamedTuple):
    """Everything needed to put a block back into the index. One is made whenever a block enters it.

    `key` and `parent_key` are 32-byte digests, `parent_key` is None at the root. `depth` counts the blocks before it,
    `stored_step` is the last executor step that had written to it when it entered the index. `tokens` are packed. In a
    lower tier `generation` is the ticket of the copy that filled the slot. A larger `last_use` is a later one.
    """

    group: int
    slot: int
    key: bytes
    parent_key: bytes | None
    depth: int
    tokens: bytes
    salt: str | None
    adapter_id: int | None
    stored_step: int
    leases: tuple[LeaseRecord, ...] = ()
    tenant_id: str | None = None
    session_id: str | None = None
    extra: bytes = b""
    tier: TierKind = TierKind.DEVICE
    generation: int = 0
    last_use: int = 0
    backup: BackupRecord | None = None

    @property
    def place(self) -> tuple[int, TierKind, int]:
        """Group, tier and slot: no two blocks have the same."""
        return self.group, self.tier, self.slot

    def below(self) -> "BlockRecord | None":
        """What is left of it without the device."""
        if self.tier is not TierKind.DEVICE or self.backup is None:
            return None if self.tier is TierKind.DEVICE else self
        return self._replace(**self.backup._asdict(), backup=None)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens as numbers."""
        return unpack(self.tokens)


def encode_place(group: int, tier: TierKind, slot: int) -> bytes:
    """The hash field of a block: where it is, so that a new block in a slot replaces the old one."""
    return _PLACE.pack(group, tier, slot)


def encode(record: BlockRecord) -> bytes:
    """The hash value of a block; its place is in the field."""
    flags = (
        _HAS_PARENT * (record.parent_key is not None)
        | _HAS_SALT * (record.salt is not None)
        | _HAS_ADAPTER * (record.adapter_id is not None)
        | _HAS_TENANT * (record.tenant_id is not None)
        | _HAS_SESSION * (record.session_id is not None)
        | _HAS_BACKUP * (record.backup is not None)
    )
    tenant, session = ((name or "").encode() for name in (record.tenant_id, record.session_id))
    num_tokens = len(record.tokens) // TOKEN_BYTES
    parts = [
        _HEAD.pack(
            _VERSION,
            flags,
            record.depth,
            record.stored_step,
            record.generation,
            record.last_use,
            num_tokens,
            len(record.leases),
            len(record.extra),
            len(tenant),
            len(session),
        ),
        record.key,
        record.parent_key or b"",
        b"" if record.adapter_id is None else struct.pack("<Q", record.adapter_id),
        b"" if record.backup is None else _BACKUP.pack(*record.backup),
        record.tokens,
        *(_encode_lease(lease) for lease in record.leases),
        record.extra,
        tenant,
        session,
        (record.salt or "").encode(),
    ]
    return b"".join(parts)


def depth_of(value: bytes) -> int:
    """The depth of a block whose record need not be readable: 0 then."""
    return int.from_bytes(value[2:6], "little") if len(value) >= _HEAD.size else 0


def decode(place: bytes, value: bytes) -> BlockRecord:
    """Reads a record back. Raises RecordError for anything that `encode` did not write."""
    try:
        group, tier, slot = _PLACE.unpack(place)
        head = {_VERSION: _HEAD, 4: _HEAD_4}.get(value[0]) if value else None
        if head is None:
            raise RecordError("record of another version")
        _, flags, depth, stored_step, generation, last_use, num_tokens, num_leases, *lengths = head.unpack_from(value)
        reader = _Reader(value, head.size)
        key = reader.take(_DIGEST_BYTES)
        parent_key = reader.take(_DIGEST_BYTES) if flags & _HAS_PARENT else None
        adapter_id = int.from_bytes(reader.take(8), "little") if flags & _HAS_ADAPTER else None
        backup = _decode_backup(reader) if flags & _HAS_BACKUP else None
        tokens = reader.take(TOKEN_BYTES * num_tokens)
        leases = tuple([_decode_lease(reader) for _ in range(num_leases)])
        extra, tenant, session = (reader.take(length) for length in lengths)
        tenant_id = tenant.decode() if flags & _HAS_TENANT else None
        session_id = session.decode() if flags & _HAS_SESSION else None
        salt = reader.rest().decode() if flags & _HAS_SALT else None
        return BlockRecord(
            group,
            slot,
            key,
            parent_key,
            depth,
            tokens,
            salt,
            adapter_id,
            stored_step,
            leases,
            tenant_id,
            session_id,
            extra,
            TierKind(tier),
            generation,
            last_use,
            backup,
        )
    except RecordError:
        raise
    except (struct.error, ValueError) as error:
        raise RecordError("record cannot be read") from error


def _decode_backup(reader: "_Reader") -> BackupRecord:
    tier, slot, generation = _BACKUP.unpack(reader.take(_BACKUP.size))
    return BackupRecord(TierKind(tier), slot, generation)


def _encode_lease(lease: LeaseRecord) -> bytes:
    holder = lease.holder.encode()
    duration, remaining = (math.nan if one is None else one for one in (lease.duration, lease.remaining))
    floor = -1 if lease.offload_min_priority is None else lease.offload_min_priority
    return _LEASE.pack(lease.priority, duration, remaining, floor, len(holder)) + holder


def _decode_lease(reader: "_Reader") -> LeaseRecord:
    priority, duration, remaining, floor, length = _LEASE.unpack(reader.take(_LEASE.size))
    holder = reader.take(length).decode()
    return LeaseRecord(
        holder,
        priority,
        None if math.isnan(duration) else duration,
        None if math.isnan(remaining) else remaining,
        None if floor < 0 else floor,
    )


class _Reader:
    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position

    def take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise RecordError("record is cut short")
        taken, self._position = self._data[self._position : end], end
        return taken

    def rest(self) -> bytes:
        return self._data[self._position :]
