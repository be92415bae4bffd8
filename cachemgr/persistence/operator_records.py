"""How Redis keeps what operators said: a byte with the version, and a message of kvcache.proto.

Times of pins are those of the executor's clock, as in `cachemgr/persistence/lease_clock.py`.
"""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError, Message

from cachemgr.blocks.block_record import RecordError
from cachemgr.operators.operator_journal import Entry, Kind, entry_name
from cachemgr.retention.rules import check_spec
from cachemgr.rpc import convert_admin
from cachemgr.types import PinRecord, PoolShare, Quota, RetentionRule
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb

_VERSION = b"\x01"
_DIGEST_BYTES = 32
_PIN_NAME = re.compile(r"pin-[0-9]{1,19}")


def to_message(entry: Entry) -> Message:
    """As the store keeps it, and the operation log."""
    match entry:
        case RetentionRule():
            return _rule(entry)
        case Quota():
            return convert_admin.quota_message(entry)
        case PoolShare():
            return convert_admin.share_message(entry)
        case PinRecord():
            return pin_message(entry)


def _rule(spec: RetentionRule) -> pb.RetentionRule:
    message = convert_admin.rule_message(spec)
    # What clients are shown ends with microseconds.
    for field, seconds in (
        ("retention_duration", spec.action.duration),
        ("pin_duration", spec.action.pin_duration),
    ):
        if seconds is not None:
            getattr(message.action, field).FromNanoseconds(round(seconds * 1e9))
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


def pin(message: pb.RememberedPin) -> PinRecord:
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
            spec = convert_admin.rule(pb.RetentionRule.FromString(data))
            check_spec(spec)
            return spec
        case Kind.QUOTA:
            quota = convert_admin.quota(pb.Quota.FromString(data))
            if not (quota.tenant_id or quota.salt):
                raise RecordError("a quota without an account")
            return quota
        case Kind.SHARE:
            return convert_admin.share(pb.PoolShare.FromString(data))
        case Kind.PIN:
            return pin(pb.RememberedPin.FromString(data))
