"""Long reads in slices: the event loop serves others in between, and the reader says what may change meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from cachemgr.errors import StateChangesError

# A slice is short beside what callers wait for anyway. A read that is disturbed takes longer ones up to the second.
SLICE_SECONDS, LONGEST_SLICE_SECONDS = 0.01, 0.03
# A read that needs the state to stand still gives up after so long.
PATIENCE_SECONDS = 20.0
# Items between two looks at the clock.
_ITEMS = 32

T = TypeVar("T")


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
                # Before it reads on: what it goes through may be another by now, or gone.
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
