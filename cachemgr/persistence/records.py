"""The values in Redis: a message of kvcache.proto for each block, and for each rule, quota, share and pin.

The value of a rule, quota, share or pin is a version byte and then the message. Times of leases and pins are on the
executor's clock, as in `cachemgr/persistence/lease_clock.py`.
"""

from __future__ import annotations

import re
import struct

from google.protobuf.message import DecodeError, Message

from cachemgr.blocks.block_record import BlockRecord, CopyRecord, LeaseRecord
from cachemgr.operators.operator_journal import Entry, Kind, entry_name
from cachemgr.retention.priority import NO_PRIORITY
from cachemgr.retention.rule_book import check_spec
from cachemgr.types import PinRecord, PoolShare, Quota, RetentionRule, RuleAction, RuleMatch, TierKind
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.block_keys import DIGEST_BYTES
from protos.kvcommon.eviction_message import EvictionPolicyRequest
from protos.kvcommon.tokens import TOKEN_BYTES
from protos.rpc.durations import duration, seconds

# group, tier, slot
_SLOT = struct.Struct("<IBI")
_VERSION = b"\x01"
_PIN_NAME = re.compile(r"pin-[0-9]{1,19}")


class RecordError(ValueError):
    """Bytes are no record of this version. Readers of Redis skip them; a replay of an operation log fails."""


def encode_slot(group: int, tier: TierKind, slot: int) -> bytes:
    """Encodes a slot as the hash field of its block, so that a new block in the slot replaces the old block."""
    return _SLOT.pack(group, tier, slot)


def encode_block(record: BlockRecord) -> bytes:
    """Encodes the hash value of a block; the field is the slot."""
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
        weight_version=record.weight_version,
    )
    for holder, priority, lasts, remaining, floor in record.leases:
        message.leases.add(
            holder=holder,
            retention_priority=None if priority == NO_PRIORITY else priority,
            duration=lasts,
            remaining=remaining,
            offload_min_priority=floor,
        )
    if record.lower_copy is not None:
        message.write_through_copy.tier, message.write_through_copy.slot, message.write_through_copy.generation = (
            record.lower_copy
        )
    return message.SerializeToString()


def depth_of(value: bytes) -> int:
    """The depth of a block; 0 if the record is not readable."""
    try:
        return pb.BlockRecord.FromString(value).depth
    except DecodeError:
        return 0


def decode_block(field: bytes, value: bytes) -> BlockRecord:
    """Decodes a record. Raises RecordError if the field or the value is malformed."""
    try:
        message = pb.BlockRecord.FromString(value)
    except DecodeError as error:
        raise RecordError("the value is no BlockRecord message") from error
    key, parent_key, tokens, has = message.key, message.parent_key, message.tokens, message.HasField
    if len(key) != DIGEST_BYTES or len(parent_key) not in (0, DIGEST_BYTES) or len(tokens) % TOKEN_BYTES:
        raise RecordError("a key or the tokens have a wrong length")
    try:
        group, tier, slot = _SLOT.unpack(field)
        copy = message.write_through_copy if has("write_through_copy") else None
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
            None if copy is None else CopyRecord(TierKind(copy.tier), copy.slot, copy.generation),
            message.weight_version,
        )
    except (struct.error, ValueError) as error:
        raise RecordError("the slot or a tier is invalid") from error


def _lease(message: pb.BlockRecord.Lease) -> LeaseRecord:
    has = message.HasField
    return LeaseRecord(
        message.holder,
        message.retention_priority if has("retention_priority") else NO_PRIORITY,
        message.duration if has("duration") else None,
        message.remaining if has("remaining") else None,
        message.offload_min_priority if has("offload_min_priority") else None,
    )


def to_message(entry: Entry) -> Message:
    """Converts an entry to the message that the store and the operation log keep."""
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
    # `rule_message` rounds durations to microseconds; the stored message has nanoseconds.
    for field, value in (
        ("retention_duration", spec.action.duration),
        ("pin_duration", spec.action.pin_duration),
    ):
        if value is not None:
            getattr(message.action, field).FromNanoseconds(round(value * 1e9))
    return message


def pin_message(record: PinRecord) -> pb.StoredPin:
    """Converts a pin to a message."""
    return pb.StoredPin(
        name=record.name,
        owner=record.owner,
        remaining=record.remaining,
        groups=[group for group, _ in record.blocks],
        keys=b"".join(key for _, key in record.blocks),
    )


def pin_of(message: pb.StoredPin) -> PinRecord:
    """Converts a message to a pin. Raises RecordError without a name or owner, or if keys and groups do not match."""
    keys = [message.keys[start : start + DIGEST_BYTES] for start in range(0, len(message.keys), DIGEST_BYTES)]
    if not _PIN_NAME.fullmatch(message.name) or not message.owner:
        raise RecordError("a pin needs a name and an owner")
    if len(message.keys) != DIGEST_BYTES * len(message.groups):
        raise RecordError("a pin must have exactly one group for each key")
    return PinRecord(message.name, message.owner, message.remaining, tuple(zip(message.groups, keys, strict=True)))


def encode_entry(entry: Entry) -> bytes:
    """Encodes the hash value of an entry."""
    return _VERSION + to_message(entry).SerializeToString(deterministic=True)


def decode_entry(kind: Kind, name: str, value: bytes) -> Entry:
    """Decodes an entry. Raises RecordError if the value is malformed, or has another version or another name."""
    if value[:1] != _VERSION:
        raise RecordError("entry of another version")
    try:
        entry = _decode_entry(kind, value[1:])
    except (DecodeError, ServiceError) as error:
        raise RecordError("entry cannot be read") from error
    if entry_name(entry) != name:
        raise RecordError("entry under another name")
    return entry


def _decode_entry(kind: Kind, data: bytes) -> Entry:
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
            return pin_of(pb.StoredPin.FromString(data))


def rule_of(message: pb.RetentionRule) -> RetentionRule:
    """Converts a message to a rule."""
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
    """Converts a rule to a message."""
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
    """Converts a message to a quota."""
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
    """Converts a quota to a message."""
    return pb.Quota(
        tenant_id=spec.tenant_id,
        salt=spec.salt,
        device_floor_blocks=spec.device_floor,
        device_ceiling_blocks=spec.device_ceiling,
        host_floor_blocks=spec.host_floor,
        host_ceiling_blocks=spec.host_ceiling,
    )


def share_of(message: pb.PoolShare) -> PoolShare:
    """Converts a message to an operator's share of a pool."""
    return PoolShare(message.pool_id, message.total_blocks, message.num_blocks, message.share_number)


def share_message(share: PoolShare) -> pb.PoolShare:
    """Converts an operator's share of a pool to a message."""
    return pb.PoolShare(
        pool_id=share.pool_id,
        total_blocks=share.total_blocks,
        num_blocks=share.num_blocks,
        share_number=share.number,
    )
