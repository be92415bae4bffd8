"""Pages of a listing: sizes within limits, and tokens that say after which item the next page begins."""

import base64
import binascii
import json
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

from cachemgr.slices import sliced
from protos.errors import InvalidField

DEFAULT_SIZE = 50
MAX_SIZE = 1000

T = TypeVar("T")


def page_limit(page_size: int) -> int:
    """The number of items of a page: 0 means 50, more than 1000 means 1000. Raises InvalidField for a negative size."""
    if page_size < 0:
        raise InvalidField("page_size", "must not be negative")
    return min(page_size or DEFAULT_SIZE, MAX_SIZE)


def encode_token(listing: str, cursor: str) -> str:
    """Makes a token for one listing; opaque to clients."""
    return base64.urlsafe_b64encode(f"{listing}:{cursor}".encode()).decode()


def decode_token(listing: str, token: str) -> str:
    """The cursor in a token; empty for an empty token. Raises InvalidField for a token of another listing."""
    if not token:
        return ""
    try:
        given_by, colon, cursor = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
    except (binascii.Error, ValueError) as error:
        raise InvalidField("page_token", "is not a token that this method gave") from error
    if given_by != listing or not colon or not cursor:
        raise InvalidField("page_token", "is not a token that this method gave")
    return cursor


def decode_number(listing: str, token: str) -> int:
    """Like `decode_token`, for listings in order of a number; 0 for an empty token."""
    cursor = decode_token(listing, token) or "0"
    # Python refuses to parse much longer numbers.
    if not cursor.isdecimal() or len(cursor) > len(str(sys.maxsize)) or int(cursor) > sys.maxsize:
        raise InvalidField("page_token", "is not a token that this method gave")
    return int(cursor)


def decode_key(listing: str, token: str, *kinds: type) -> tuple[Any, ...]:
    """Like `decode_token`, for listings in order of several values of the types `kinds`; () for an empty token."""
    cursor = decode_token(listing, token) or "[]"
    try:
        key = json.loads(cursor)
    except (ValueError, RecursionError) as error:
        raise InvalidField("page_token", "is not a token that this method gave") from error
    if not isinstance(key, list) or (key and [type(value) for value in key] != list(kinds)):
        raise InvalidField("page_token", "is not a token that this method gave")
    return tuple(key)


async def cut_in_slices(
    items: Iterable[T | None], limit: int, listing: str, cursor: Callable[[T], object]
) -> tuple[list[T], str]:
    """Like `cut`, for a long search during which other calls run. None stands for an item that does not match."""
    found: list[T] = []
    async for part in sliced(items):
        found += [item for item in part if item is not None]
        if len(found) > limit:
            break
    return cut(found, limit, listing, cursor)


def cut(items: Iterable[T], limit: int, listing: str, cursor: Callable[[T], object]) -> tuple[list[T], str]:
    """The first `limit` items and the token of the next page; the token is empty if nothing is left."""
    found = list(islice(items, limit + 1))
    if len(found) <= limit:
        return found, ""
    return found[:limit], encode_token(listing, str(cursor(found[limit - 1])))
