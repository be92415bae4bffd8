"""Keys of blocks: a SHA-256 chain per executor model, salt and adapter.

    root  = H("kvkeep/root/1\\0"  | u32 length, fingerprint | salt | adapter)
    child = H("kvkeep/block/2\\0" | parent, 32 bytes | u32 number of tokens, tokens as u32 | extra)

All numbers are little-endian. salt: byte 0 for none, else byte 1, u32 length, UTF-8. adapter: byte 0 for none, else
byte 1, u64. extra: for each piece of content that is no token and that a token of the block stands for, in order: i32
first token of the piece counted from the block's first, u32 tokens of the block that stand for it, u32 length, digest;
nothing when there is none. Every part has a fixed or a stated length, so that no two inputs run together into the same
bytes.
`docs/keys.md` is the same specification for clients that compute keys.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import sha256

from cachemgr.tokens import TOKEN_BYTES
from cachemgr.types import ExtraKey

DIGEST_BYTES = 32

_ROOT = b"kvkeep/root/1\0"
_CHILD = b"kvkeep/block/2\0"
# Of an extra key in a block, before its digest: first token, number of tokens, length of the digest.
_PIECE = struct.Struct("<iII")


def root_key(fingerprint: bytes, salt: str | None, adapter_id: int | None) -> bytes:
    """The parent key of the first block of a chain."""
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


def cut_extra_keys(extra_keys: Sequence[ExtraKey], num_tokens: int) -> tuple[ExtraKey, ...]:
    """The extra keys of the first `num_tokens` tokens, the last one cut off there."""
    return tuple(
        extra._replace(length=min(extra.length, num_tokens - extra.start))
        for extra in extra_keys
        if extra.start < num_tokens
    )


def extra_bytes(extra_keys: Sequence[ExtraKey], start: int, end: int) -> bytes:
    """The extra content of the tokens in [start, end), as it enters the key of their block.

    Nothing behind the block counts: a fork or a truncation within a piece leaves the keys of the blocks before it.
    """
    parts: list[bytes] = []
    # They do not overlap: the first that reaches into the block is the first that ends behind its begin.
    for index in range(bisect_right(extra_keys, start, key=_end_of), len(extra_keys)):
        extra = extra_keys[index]
        if extra.start >= end:
            break
        covered = min(extra.start + extra.length, end) - max(extra.start, start)
        parts.append(_PIECE.pack(extra.start - start, covered, len(extra.digest)) + extra.digest)
    return b"".join(parts)


def extra_digests(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """From the extra bytes of a block: the first token of each extra key, counted from the block's, and its digest."""
    at = 0
    while at < len(extra):
        start, _, length = _PIECE.unpack_from(extra, at)
        at += _PIECE.size
        yield start, extra[at : at + length]
        at += length


def _end_of(extra: ExtraKey) -> int:
    return extra.start + extra.length


def extend_chain(keys: list[bytes], root: bytes, packed: bytes, block_size: int) -> None:
    """Appends the keys of all full blocks in `packed`, the tokens behind those of `keys`."""
    parent = keys[-1] if keys else root
    count = struct.pack("<I", block_size)
    width = block_size * TOKEN_BYTES
    for start in range(0, len(packed) - width + 1, width):
        parent = sha256(_CHILD + parent + count + packed[start : start + width]).digest()
        keys.append(parent)


def prefix_keys(root: bytes, packed: bytes, block_size: int, extra_keys: Sequence[ExtraKey] = ()) -> list[bytes]:
    """Keys of all full blocks of a prompt."""
    keys: list[bytes] = []
    extend_keys(keys, root, packed, block_size, extra_keys)
    return keys


def extend_keys(
    keys: list[bytes], root: bytes, packed: bytes, block_size: int, extra_keys: Sequence[ExtraKey] = ()
) -> None:
    """As `extend_chain`, with extra keys."""
    if not extra_keys:
        extend_chain(keys, root, packed, block_size)
        return
    width = block_size * TOKEN_BYTES
    for at in range(0, len(packed) - width + 1, width):
        start = len(keys) * block_size
        extra = extra_bytes(extra_keys, start, start + block_size)
        keys.append(child_key(keys[-1] if keys else root, packed[at : at + width], extra))
