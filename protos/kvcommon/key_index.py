"""Names and values of the index by key in Redis, as cache managers write it and routers read it.

`docs/redis.md` explains their purpose.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self
from urllib.parse import quote

_ENTRY = struct.Struct("<BQQ")


class FormatError(ValueError):
    """A value that no cache manager of this version has written."""


class Position(NamedTuple):
    """A moment in the life of a shard: its cache manager's epoch, and the number of its last event."""

    manager_epoch: int
    event_number: int


class Entry(NamedTuple):
    """A block on one executor. tier: 0 device, 1 host, 2 disk. position: of the shard when the entry was written."""

    tier: int
    position: Position

    def encode(self) -> bytes:
        return _ENTRY.pack(self.tier, *self.position)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises FormatError."""
        if len(value) != _ENTRY.size:
            raise FormatError(f"an entry has {_ENTRY.size} bytes")
        tier, epoch, number = _ENTRY.unpack(value)
        return cls(tier, Position(epoch, number))


@dataclass(frozen=True, slots=True)
class IndexedExecutor:
    """The facts about an executor that are needed to read its entries.

    This manager's entries count from the event `since` on. The index has all events up to `event_number`.
    """

    manager_epoch: int
    since: int
    event_number: int
    executor_epoch: int
    model_fingerprint: bytes
    block_size: int
    shard: str = ""
    weight_version: str = ""

    def counts(self, position: Position) -> bool:
        """Whether an entry as of this position still describes the executor."""
        return position.manager_epoch == self.manager_epoch and position.event_number >= self.since

    def encode(self) -> bytes:
        return json.dumps(asdict(self) | {"model_fingerprint": self.model_fingerprint.hex()}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises FormatError."""
        try:
            fields = json.loads(value)
            numbers = ("manager_epoch", "since", "event_number", "executor_epoch", "block_size")
            found = cls(
                **{name: int(fields[name]) for name in numbers},
                model_fingerprint=bytes.fromhex(fields["model_fingerprint"]),
                shard=str(fields["shard"]),
                weight_version=str(fields["weight_version"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError("an executor is a JSON object with numbers and a fingerprint") from error
        if not 0 < found.block_size < 1 << 32:
            raise FormatError("block_size must be from 1 to 4294967295")
        return found


def block_name(first: bytes, key: bytes) -> str:
    """The name of a block's key. first: the key of its chain's first block. A chain lies in one slot of a cluster."""
    return f"kvkeep:idx:{{{first.hex()}}}:{key.hex()}"


def executor_name(executor_id: str) -> str:
    """The name of an executor's key."""
    return f"kvkeep:idx-executor:{quote(executor_id, safe='')}"
