"""Checks of external input that several calls share. All raise InvalidField."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from cachemgr.types import ExtraKey
from protos.errors import InvalidField
from protos.kvcommon.tokens import pack

MAX_ID_BYTES = 256
MAX_DIGEST_BYTES = 64
# The limit for one prompt: one piece for each 32 tokens of 128k.
MAX_EXTRA_KEYS = 4096


def check_id(field: str, value: str) -> None:
    """Checks that an id is not empty and not too long."""
    if not value:
        raise InvalidField(field, "must not be empty")
    if len(value.encode()) > MAX_ID_BYTES:
        raise InvalidField(field, f"must be at most {MAX_ID_BYTES} bytes")


def check_weight_version(version: str) -> None:
    """Checks that a weight version is not too long; it is empty for the weights of an executor's start."""
    if version:
        check_id("weight_version", version)


def check_tokens(field: str, token_ids: Sequence[int]) -> array[int]:
    """Checks that there are token ids and that they have 32 bits; returns them packed."""
    if not token_ids:
        raise InvalidField(field, "must not be empty")
    try:
        return pack(token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidField(field, "must be numbers from 0 to 4294967295") from error


def check_extra_keys(path: str, extra_keys: Collection[ExtraKey], num_tokens: int) -> None:
    """Checks that content lies within the tokens, in order and without overlap; limits pieces and digests."""
    if len(extra_keys) > MAX_EXTRA_KEYS:
        raise InvalidField(path, f"must be at most {MAX_EXTRA_KEYS}")
    end = 0
    for index, extra in enumerate(extra_keys):
        if extra.start < end:
            raise InvalidField(f"{path}[{index}].start", "must not be before the end of the previous piece")
        end = extra.start + extra.length
        if extra.length < 1 or end > num_tokens:
            raise InvalidField(f"{path}[{index}].length", f"must be at least 1 and end within the {num_tokens} tokens")
        if not 1 <= len(extra.digest) <= MAX_DIGEST_BYTES:
            raise InvalidField(f"{path}[{index}].digest", f"must have 1 to {MAX_DIGEST_BYTES} bytes")
