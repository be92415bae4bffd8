"""Decides whether the executor serves: the cache manager has registered it, and its device makes progress."""

import asyncio
from collections.abc import Callable

import structlog

from executor.core.worker import Worker

log = structlog.get_logger()

TICK_SECONDS = 1.0
# Ticks for which the device's thread may make no progress: STILL_TICKS, or STILL_TIMES the longest of the last steps
# if this is more. The first step may take longer, as devices compile and load. The scheduler calls a step late by the
# same factor, with the same bound for the first step. A tick counts once it is over: a pause of the whole process is a
# single tick.
STILL_TICKS, STILL_TIMES, FIRST_STEP_TICKS = 10, 5, 75
# Ticks without progress until the process ends, if the session that the device works for has ended, and the device has
# had its time for the step. No scheduler waits for the step any more, and only a new process can serve another one.
ABANDONED_TICKS = 30


def still_ticks(longest_step: float | None) -> float:
    """Returns the ticks for which the device's thread may make no progress.

    longest_step: seconds; None before a step has ended.
    """
    if longest_step is None:
        return FIRST_STEP_TICKS
    return max(STILL_TICKS, STILL_TIMES * longest_step / TICK_SECONDS)


class Watchdog:
    """Watches the device's thread from the asyncio loop."""

    def __init__(self, worker: Worker, set_serving: Callable[[bool], None], give_up: Callable[[], None]) -> None:
        """set_serving: called with whether the executor can serve. give_up: called once, if it never can again."""
        self._worker = worker
        self._set_serving = set_serving
        self._give_up = give_up
        self._registered = False
        self._moves = True

    def set_registered(self, registered: bool) -> None:
        """Notes whether the cache manager knows the executor."""
        self._registered = registered
        self._report()

    async def run(self) -> None:
        """Watches until it is cancelled, or has given up."""
        last, still, abandoned, moves = None, 0, 0, True
        while moves or abandoned < ABANDONED_TICKS:
            await asyncio.sleep(TICK_SECONDS)
            turn = self._worker.turn
            still = still + 1 if turn is not None and turn == last else 0
            abandoned = abandoned + 1 if still and self._worker.is_abandoned else 0
            last = turn
            moves = still < still_ticks(self._worker.longest_step)
            if self._moves != moves:
                self._moves = moves
                self._report()
                if self._moves:
                    log.info("the device makes progress again")
                else:
                    log.error("the device makes no progress", seconds=round(still * TICK_SECONDS))
        log.error("the device stays without progress: the process ends")
        self._give_up()

    def _report(self) -> None:
        self._set_serving(self._registered and self._moves)
