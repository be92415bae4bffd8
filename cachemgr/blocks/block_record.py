"""What of a block outlives the process, and how Redis keeps it."""

import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError

from cachemgr.tokens import TOKEN_BYTES, unpack
from cachemgr.types import Slot, TierKind
from protos.kvcache.v1 import kvcache_pb2 as pb

# group, tier, slot
_PLACE = struct.Struct("<IBI")
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
    def place(self) -> Slot:
        """Where it is: no two blocks are in the same place."""
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


class IndexJournal(Protocol):
    """Hears of every change of the prefix index, at once and in order. Must not fail or block."""

    def cleared(self, executor_id: str, epoch: int) -> None:
        """The executor starts an epoch with an empty index."""

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        """A block of the index came to this place, or the one there changed.

        `current` tells what is there when it is called; None when the block is gone by then.
        """

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        """The block at this place left it, or the index."""


class NoJournal:
    """Keeps nothing."""

    def cleared(self, executor_id: str, epoch: int) -> None:
        """Forgets it."""

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        """Forgets it."""

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        """Forgets it."""


def encode_place(group: int, tier: TierKind, slot: int) -> bytes:
    """The hash field of a block: where it is, so that a new block in a slot replaces the old one."""
    return _PLACE.pack(group, tier, slot)


def encode(record: BlockRecord) -> bytes:
    """The hash value of a block; its place is in the field."""
    message = pb.BlockRecord(
        depth=record.depth,
        key=record.key,
        parent_key=record.parent_key,
        tokens=record.tokens,
        stored_step=record.stored_step,
        generation=record.generation,
        last_use=record.last_use,
        extra=record.extra,
        salt=record.salt,
        adapter_id=record.adapter_id,
        tenant_id=record.tenant_id,
        session_id=record.session_id,
    )
    for holder, priority, duration, remaining, floor in record.leases:
        message.leases.add(
            holder=holder,
            retention_priority=priority,
            duration=duration,
            remaining=remaining,
            offload_min_priority=floor,
        )
    if record.backup is not None:
        message.backup.tier, message.backup.slot, message.backup.generation = record.backup
    return message.SerializeToString()


def depth_of(value: bytes) -> int:
    """The depth of a block whose record need not be readable: 0 then."""
    try:
        return pb.BlockRecord.FromString(value).depth
    except DecodeError:
        return 0


def decode(place: bytes, value: bytes) -> BlockRecord:
    """Reads a record back. Raises RecordError for anything that `encode` did not write."""
    try:
        message = pb.BlockRecord.FromString(value)
    except DecodeError as error:
        raise RecordError("record of another version") from error
    key, parent_key, tokens, has = message.key, message.parent_key, message.tokens, message.HasField
    if len(key) != _DIGEST_BYTES or len(parent_key) not in (0, _DIGEST_BYTES) or len(tokens) % TOKEN_BYTES:
        raise RecordError("record cannot be read")
    try:
        group, tier, slot = _PLACE.unpack(place)
        backup = message.backup if has("backup") else None
        return BlockRecord(
            group,
            slot,
            key,
            parent_key or None,
            message.depth,
            tokens,
            message.salt if has("salt") else None,
            message.adapter_id if has("adapter_id") else None,
            message.stored_step,
            tuple([_lease(lease) for lease in message.leases]),
            message.tenant_id if has("tenant_id") else None,
            message.session_id if has("session_id") else None,
            message.extra,
            TierKind(tier),
            message.generation,
            message.last_use,
            None if backup is None else BackupRecord(TierKind(backup.tier), backup.slot, backup.generation),
        )
    except (struct.error, ValueError) as error:
        raise RecordError("record cannot be read") from error


def _lease(message: pb.BlockRecord.Lease) -> LeaseRecord:
    has = message.HasField
    return LeaseRecord(
        message.holder,
        message.retention_priority,
        message.duration if has("duration") else None,
        message.remaining if has("remaining") else None,
        message.offload_min_priority if has("offload_min_priority") else None,
    )
