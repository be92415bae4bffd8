"""Changes and reads of very many blocks, in slices: other calls run between two slices.

A slice of a change is atomic and depends only on the manager's state: a replay of the slices leads to the same state.
During a read, the state may change between two slices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from cachemgr.errors import StateChangesError

# How many blocks a slice of a change looks at, and how many it changes: some milliseconds each.
LOOKS, CHANGES = 8192, 256
# A slice of a read is short compared to other waits of callers. A disturbed read takes longer slices, up to the second
# limit.
SLICE_SECONDS, LONGEST_SLICE_SECONDS = 0.01, 0.03
# A read that needs an unchanged state gives up after this time.
PATIENCE_SECONDS = 20.0
# How many items are processed between two looks at the clock.
_ITEMS = 32

T = TypeVar("T")
Slices = Generator[None, None, T]


def at_once(slices: Slices[T]) -> T:
    """Runs a call without a break and returns its result."""
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            found: T = ended.value
            return found


def read_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yields the items in lists; a slice looks at the items of one list."""
    return _parted(items, LOOKS)


def pop_batches(items: list[T]) -> Iterator[list[T]]:
    """Like `read_batches`, but pops the items from the end of the list, so that garbage collections walk less."""
    while items:
        part = items[-LOOKS:]
        del items[-LOOKS:]
        yield part


def write_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yields the items in lists; a slice changes the items of one list."""
    return _parted(items, CHANGES)


def _parted(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


async def sliced(items: Iterable[T], seconds: float = SLICE_SECONDS) -> AsyncIterator[list[T]]:
    """Yields the items in lists, one per slice. The state may change between two slices."""
    found: list[T] = []
    end = time.perf_counter() + seconds
    for number, item in enumerate(items, start=1):
        found.append(item)
        if not number % _ITEMS and time.perf_counter() >= end:
            yield found
            found = []
            await asyncio.sleep(0)
            end = time.perf_counter() + seconds
    yield found


async def steady(read: Callable[[], Iterable[T | None]], state: Callable[[], object]) -> list[T]:
    """Returns all items except None of a read during which the state did not change.

    A read that fits into one slice always succeeds. Raises StateChangesError if the state keeps changing.
    """
    give_up, seconds = time.perf_counter() + PATIENCE_SECONDS, SLICE_SECONDS
    while True:
        before = state()
        found: list[T] = []
        end = time.perf_counter() + seconds
        for number, item in enumerate(read(), start=1):
            if item is not None:
                found.append(item)
            if not number % _ITEMS and time.perf_counter() >= end:
                await asyncio.sleep(0)
                # Checked before the read continues: the object that is read may have been replaced or removed.
                if state() != before:
                    break
                end = time.perf_counter() + seconds
        else:
            return found
        if time.perf_counter() >= give_up:
            raise StateChangesError("the state changes all the time while it is read", retry_after=1.0)
        seconds = min(2 * seconds, LONGEST_SLICE_SECONDS)
        # Not longer: right after a change, the time until the next change is longest.
        await asyncio.sleep(SLICE_SECONDS)
