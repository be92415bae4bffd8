"""Calls that touch very many blocks, in steps: each is atomic, and other calls are answered between two of them.

A step depends on nothing but the manager's state, so a log of the steps leads to the same state again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

# Blocks that one step looks at, and that one step changes: some milliseconds each.
LOOKS, CHANGES = 8192, 256

T = TypeVar("T")
Steps = Generator[None, None, T]


def at_once(steps: Steps[T]) -> T:
    """The result of a call that is carried out without a break."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            found: T = ended.value
            return found


def looks(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in parts of as many as one step looks at."""
    return _parted(items, LOOKS)


def drained(items: list[T]) -> Iterator[list[T]]:
    """As `looks`, from the end, and nothing stays: a garbage collection walks all of a list that is young."""
    while items:
        part = items[-LOOKS:]
        del items[-LOOKS:]
        yield part


def changes(items: Iterable[T]) -> Iterator[list[T]]:
    """As many as one step changes, at a time."""
    return _parted(items, CHANGES)


def _parted(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
