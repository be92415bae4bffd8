"""Keys of blocks: a SHA-256 chain per executor model, salt, adapter and version of the weights.

    root  = H("kvkeep/root/1\\0"  | u32 length, fingerprint | salt | adapter | weight version)
    child = H("kvkeep/block/2\\0" | parent, 32 bytes | u32 number of tokens, tokens as u32 | extra)

All numbers are little-endian. salt: byte 0 for none, else byte 1, u32 length, UTF-8. adapter: byte 0 for none, else
byte 1, u64. weight version: nothing for the weights that the executor was started with, else byte 1, u32 length, UTF-8.
extra: nothing, or for each piece of non-token content that tokens of the block stand for, in order: i32 first token of
the piece counted from the block's first, u32 tokens of the block that stand for it, u32 length, digest.
Every part has a fixed or a stated length, so that different inputs never give the same bytes. `docs/keys.md` is the
same specification for clients that compute keys.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256

from protos.kvcommon.tokens import TOKEN_BYTES

DIGEST_BYTES = 32

_ROOT = b"kvkeep/root/1\0"
_CHILD = b"kvkeep/block/2\0"
# The hash of every child key begins like this; a copy of the begun hash takes a sixth less time.
_begin_child = sha256(_CHILD).copy


def root_key(fingerprint: bytes, salt: str | None, adapter_id: int | None, weight_version: str = "") -> bytes:
    """The parent key of the first block of a chain. weight_version: empty for the weights of the executor's start."""
    return sha256(
        b"".join(
            (
                _ROOT,
                struct.pack("<I", len(fingerprint)),
                fingerprint,
                b"\0" if salt is None else _text(salt),
                b"\0" if adapter_id is None else b"\1" + struct.pack("<Q", adapter_id),
                _text(weight_version) if weight_version else b"",
            )
        )
    ).digest()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"\1" + struct.pack("<I", len(encoded)) + encoded


def child_key(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """Key of a block with these packed tokens after `parent`."""
    child = _begin_child()
    child.update(parent + struct.pack("<I", len(tokens) // TOKEN_BYTES) + tokens + extra)
    return child.digest()


def extend_chain(keys: list[bytes], root: bytes, packed: bytes, block_size: int) -> None:
    """Appends the keys of all full blocks in `packed`, the tokens after the blocks of `keys`."""
    parent = keys[-1] if keys else root
    count = struct.pack("<I", block_size)
    width = block_size * TOKEN_BYTES
    for start in range(0, len(packed) - width + 1, width):
        child = _begin_child()
        child.update(parent + count + packed[start : start + width])
        parent = child.digest()
        keys.append(parent)


def low_keys(keys: Iterable[bytes]) -> array[int]:
    """The low 64 bits of each key, by which routers know the key: its first eight bytes, little-endian."""
    words = array("Q", b"".join(keys))[:: DIGEST_BYTES // 8]
    if sys.byteorder == "big":
        words.byteswap()
    return words


def prompt_low_keys(root: bytes, packed: bytes, block_size: int) -> array[int]:
    """The low 64 bits of the keys of all full blocks of a prompt."""
    keys: list[bytes] = []
    extend_chain(keys, root, packed, block_size)
    return low_keys(keys)
