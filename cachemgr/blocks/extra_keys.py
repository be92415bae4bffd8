"""Content in the keys of blocks that is not a token, such as an image."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from cachemgr.types import ExtraKey
from protos.kvcommon.block_keys import child_key, extend_chain
from protos.kvcommon.tokens import TOKEN_BYTES

# The header of an extra key in a block, before its digest: first token, number of tokens, length of the digest.
_PIECE = struct.Struct("<iII")


def cut_extra_keys(extra_keys: Sequence[ExtraKey], num_tokens: int) -> tuple[ExtraKey, ...]:
    """The extra keys of the first `num_tokens` tokens, the last key cut off there."""
    return tuple(
        extra._replace(length=min(extra.length, num_tokens - extra.start))
        for extra in extra_keys
        if extra.start < num_tokens
    )


def extra_bytes(extra_keys: Sequence[ExtraKey], start: int, end: int) -> bytes:
    """The extra content of the tokens in [start, end), as it enters the key of their block.

    Nothing after the block counts. If a fork or a truncation cuts an extra key off in a later block, the block's key
    stays the same.
    """
    parts: list[bytes] = []
    # Extra keys do not overlap: the first that reaches into the block is the first that ends after the block's start.
    for index in range(bisect_right(extra_keys, start, key=_end_of), len(extra_keys)):
        extra = extra_keys[index]
        if extra.start >= end:
            break
        covered = min(extra.start + extra.length, end) - max(extra.start, start)
        parts.append(_PIECE.pack(extra.start - start, covered, len(extra.digest)) + extra.digest)
    return b"".join(parts)


def extra_digests(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Reads a block's extra bytes: yields each extra key's first token, counted from the block's first, and digest."""
    at = 0
    while at < len(extra):
        start, _, length = _PIECE.unpack_from(extra, at)
        at += _PIECE.size
        yield start, extra[at : at + length]
        at += length


def _end_of(extra: ExtraKey) -> int:
    return extra.start + extra.length


def prefix_keys(root: bytes, packed: bytes, block_size: int, extra_keys: Sequence[ExtraKey] = ()) -> list[bytes]:
    """Keys of all full blocks of a prompt."""
    keys: list[bytes] = []
    extend_keys(keys, root, packed, block_size, extra_keys)
    return keys


def extend_keys(
    keys: list[bytes], root: bytes, packed: bytes, block_size: int, extra_keys: Sequence[ExtraKey] = ()
) -> None:
    """Like `extend_chain`, with extra keys."""
    if not extra_keys:
        extend_chain(keys, root, packed, block_size)
        return
    width = block_size * TOKEN_BYTES
    for at in range(0, len(packed) - width + 1, width):
        start = len(keys) * block_size
        extra = extra_bytes(extra_keys, start, start + block_size)
        keys.append(child_key(keys[-1] if keys else root, packed[at : at + width], extra))
