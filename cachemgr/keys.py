"""Keys of blocks: a SHA-256 chain per executor model, salt and adapter.

    root  = H("kvkeep/root/1\\0"  | u32 length, fingerprint | salt | adapter)
    child = H("kvkeep/block/1\\0" | parent, 32 bytes | u32 number of tokens, tokens as u32 | extra)

All numbers are little-endian. salt: byte 0 for none, else byte 1, u32 length, UTF-8. adapter: byte 0 for none, else
byte 1, u64. Every part has a fixed or a stated length, so that no two inputs run together into the same bytes.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

DIGEST_BYTES = 32
TOKEN_BYTES = 4

_ROOT = b"kvkeep/root/1\0"
_CHILD = b"kvkeep/block/1\0"


class Domain:
    """Who may share blocks: sequences of one model with equal salt and equal adapter."""

    __slots__ = ("__weakref__", "adapter_id", "key", "salt")

    def __init__(self, fingerprint: bytes, salt: str | None, adapter_id: int | None) -> None:
        self.salt = salt
        self.adapter_id = adapter_id
        self.key = root_key(fingerprint, salt, adapter_id)


def root_key(fingerprint: bytes, salt: str | None, adapter_id: int | None) -> bytes:
    """What stands before the first block of a chain."""
    encoded = b"" if salt is None else salt.encode()
    return sha256(
        b"".join(
            (
                _ROOT,
                struct.pack("<I", len(fingerprint)),
                fingerprint,
                b"\0" if salt is None else b"\1" + struct.pack("<I", len(encoded)) + encoded,
                b"\0" if adapter_id is None else b"\1" + struct.pack("<Q", adapter_id),
            )
        )
    ).digest()


def child_key(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """Key of a block with these packed tokens behind `parent`."""
    return sha256(_CHILD + parent + struct.pack("<I", len(tokens) // TOKEN_BYTES) + tokens + extra).digest()


def extend_chain(keys: list[bytes], root: bytes, packed: bytes, block_size: int) -> None:
    """Appends the keys of all full blocks in `packed`, the tokens behind those that `keys` is about."""
    parent = keys[-1] if keys else root
    count = struct.pack("<I", block_size)
    width = block_size * TOKEN_BYTES
    for start in range(0, len(packed) - width + 1, width):
        parent = sha256(_CHILD + parent + count + packed[start : start + width]).digest()
        keys.append(parent)


def pack(token_ids: Sequence[int]) -> array[int]:
    """Token ids as 32-bit numbers. Raises OverflowError or TypeError for anything else."""
    return array("I", token_ids)


def packed_bytes(tokens: array[int]) -> bytes:
    """Little-endian bytes of packed tokens."""
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def unpack(packed: bytes) -> tuple[int, ...]:
    """Token ids of packed bytes."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)
