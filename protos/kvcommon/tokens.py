"""Token ids as packed 32-bit numbers."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4


def pack(token_ids: Sequence[int]) -> array[int]:
    """Packs token ids as 32-bit numbers. Raises OverflowError or TypeError for anything else."""
    return array("I", token_ids)


def packed_bytes(tokens: array[int]) -> bytes:
    """Little-endian bytes of packed tokens."""
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)
