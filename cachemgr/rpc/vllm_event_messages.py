"""Messages of vLLM's KV events: a batch is an array of its time, its events and a rank; an event is a map."""

from __future__ import annotations

import time
from functools import lru_cache
from hashlib import sha256

import msgspec

from cachemgr.blocks.extra_keys import extra_digests
from cachemgr.types import BlockView, Scope, TierKind
from protos.kvcommon.block_keys import low_keys
from protos.kvcommon.tokens import unpack

# The readers' names of the tiers.
_MEDIA = {TierKind.DEVICE: "GPU", TierKind.HOST: "CPU", TierKind.DISK: "STORAGE"}
# An extra key with this prefix names the salt; any other text is not part of a salt.
_SALT = "dynamo-cache-salt:"


class BlockStored(msgspec.Struct, tag=True):
    """Consecutive blocks of a chain that have entered a tier. `extra_keys` has an entry for each block."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str | tuple[str, int]] | None]


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that have left a tier."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block is in any tier."""


class Batch:
    """A batch that grows. Consecutive blocks of one chain share an event, as do removed blocks."""

    def __init__(self, block_size: int, *, token_ids: bool) -> None:
        """`token_ids`: whether to send stored blocks with their tokens."""
        self._block_size = block_size
        self._token_ids = token_ids
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        # The key of the last added stored block.
        self._last_key = b""
        self.num_blocks = 0

    def clear(self) -> None:
        """Adds that all blocks are gone; drops earlier events of the batch."""
        self._events = [AllBlocksCleared()]

    def store(self, block: BlockView) -> None:
        """Adds a full block that has entered its tier."""
        event = self._events[-1] if self._events else None
        medium = _MEDIA[block.tier]
        if not isinstance(event, BlockStored) or event.medium != medium or block.parent_key != self._last_key:
            event = self._new_chain(block, medium)
            self._events.append(event)
        event.block_hashes += low_keys([block.key])
        event.extra_keys.append(_extra_keys(block.scope))
        if self._token_ids:
            event.token_ids.extend(unpack(block.tokens))
        self._last_key = block.key
        self.num_blocks += 1

    def _new_chain(self, block: BlockView, medium: str) -> BlockStored:
        adapter = None if block.scope is None else block.scope.adapter_id
        parent = low_keys([block.parent_key])[0] if block.parent_key else None
        # Readers distinguish adapters by name, and assign blocks without a name to the base model.
        name = None if adapter is None else str(adapter)
        return BlockStored([], parent, [], self._block_size, adapter, medium, name, [])

    def remove(self, key: bytes, tier: TierKind) -> None:
        """Adds that a block has left a tier."""
        event = self._events[-1] if self._events else None
        medium = _MEDIA[tier]
        if not isinstance(event, BlockRemoved) or event.medium != medium:
            event = BlockRemoved([], medium)
            self._events.append(event)
        event.block_hashes += low_keys([key])
        self.num_blocks += 1

    def __bool__(self) -> bool:
        return bool(self._events)

    def encoded(self) -> bytes:
        """The message, with the present time. It has no rank, so that the reader's own rank for this address counts."""
        return msgspec.msgpack.encode((time.time(), self._events, None))


def _extra_keys(scope: Scope | None) -> list[str | tuple[str, int]] | None:
    """The parts that distinguish blocks with the same tokens: adapter, content other than text, salt and weights."""
    if scope is None:
        return None
    found: list[str | tuple[str, int]] = []
    if scope.adapter_id is not None:
        found.append(str(scope.adapter_id))
    found += [(digest.hex(), start) for start, digest in extra_digests(scope.extra)]
    if scope.salt is not None:
        found.append(salt_name(scope.salt))
    if scope.weight_version:
        found.append(f"weights:{scope.weight_version}")
    return found or None


@lru_cache(maxsize=1024)
def salt_name(salt: str) -> str:
    """The name of a salt in events: the salt itself if a router made it, else 16 hex digits of its SHA-256."""
    if salt.startswith(_SALT) and salt != _SALT:
        return salt
    return _SALT + sha256(salt.encode()).hexdigest()[:16]
