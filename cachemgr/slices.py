"""Calls that change very many blocks, in steps, and reads of very many, in slices: others are answered in between.

A step is atomic and depends on nothing but the manager's state, so a log of the steps leads to the same state again.
During a read the state may change between two slices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from cachemgr.errors import StateChangesError

# Blocks that one step looks at, and that one step changes: some milliseconds each.
LOOKS, CHANGES = 8192, 256
# A slice is short beside what callers wait for anyway. A read that is disturbed takes longer ones up to the second.
SLICE_SECONDS, LONGEST_SLICE_SECONDS = 0.01, 0.03
# A read that needs the state to stand still gives up after so long.
PATIENCE_SECONDS = 20.0
# Items between two looks at the clock.
_ITEMS = 32

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


def read_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in parts of as many as one step looks at."""
    return _parted(items, LOOKS)


def pop_batches(items: list[T]) -> Iterator[list[T]]:
    """As `read_batches`, from the end, and nothing stays: a garbage collection walks all of a list that is young."""
    while items:
        part = items[-LOOKS:]
        del items[-LOOKS:]
        yield part


def write_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """As many as one step changes, at a time."""
    return _parted(items, CHANGES)


def _parted(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


async def sliced(items: Iterable[T], seconds: float = SLICE_SECONDS) -> AsyncIterator[list[T]]:
    """The items in lists, one per slice. The state may change between two of them."""
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
    """All items but None of a read during which the state did not change.

    What fits into one slice is always read at once. Raises StateChangesError when the state does not stand still.
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
                # Before it reads on: the object that it reads may be another by now, or none.
                if state() != before:
                    break
                end = time.perf_counter() + seconds
        else:
            return found
        if time.perf_counter() >= give_up:
            raise StateChangesError("the state changes all the time while it is read", retry_after=1.0)
        seconds = min(2 * seconds, LONGEST_SLICE_SECONDS)
        # Not for longer: right behind a change it is longest until the next one.
        await asyncio.sleep(SLICE_SECONDS)
