"""Says whether the executor is of use: the cache manager knows it, and its device moves."""

import asyncio
from collections.abc import Callable

import structlog

from executor.core.worker import Worker

log = structlog.get_logger()

TICK_SECONDS = 1.0
# Ticks in which the device's thread may stand still: at least so many, and so many times what the longest of the last
# steps took. Before a step has ended nothing is known: devices compile and load at first. The scheduler calls a step
# late by the same measure. A tick is counted when it is over: to a process that was stopped, its pause is one tick.
STILL_TICKS, STILL_TIMES, FIRST_STEP_TICKS = 10, 5, 75
# And ticks behind the end of the session that it works for. Its scheduler has given it up then, by a bound that knows
# what steps take, and only another process helps.
ABANDONED_TICKS = 30


def still_ticks(longest_step: float | None) -> float:
    """Ticks in which the device's thread may stand still. longest_step: seconds; None before a step has ended."""
    if longest_step is None:
        return FIRST_STEP_TICKS
    return max(STILL_TICKS, STILL_TIMES * longest_step / TICK_SECONDS)


class Watchdog:
    """Looks at the device's thread from the asyncio loop."""

    def __init__(self, worker: Worker, set_serving: Callable[[bool], None], give_up: Callable[[], None]) -> None:
        """set_serving: called with whether the executor is of use. give_up: called once when it never will be."""
        self._worker = worker
        self._set_serving = set_serving
        self._give_up = give_up
        self._registered = False
        self._moves = True

    def set_registered(self, registered: bool) -> None:
        """Whether the cache manager knows the executor."""
        self._registered = registered
        self._tell()

    async def run(self) -> None:
        """Watches until it is cancelled, or has given up."""
        last, still, abandoned = None, 0, 0
        while abandoned < ABANDONED_TICKS:
            await asyncio.sleep(TICK_SECONDS)
            turn = self._worker.turn
            still = still + 1 if turn is not None and turn == last else 0
            abandoned = abandoned + 1 if still and self._worker.is_abandoned else 0
            last = turn
            moves = still < still_ticks(self._worker.longest_step)
            if self._moves != moves:
                self._moves = moves
                self._tell()
                if self._moves:
                    log.info("the device moves again")
                else:
                    log.error("the device stands still", seconds=round(still * TICK_SECONDS))
        log.error("the device does not come back: the process ends")
        self._give_up()

    def _tell(self) -> None:
        self._set_serving(self._registered and self._moves)
