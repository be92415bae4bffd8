"""When streams hear of their tokens. On the asyncio loop."""

import asyncio
import time
from collections import deque

from scheduler.frontend.output import Generation

# Every stream gets a message as often as one such time for each stream has passed: with few streams that is for every
# token, with very many for several at once, or writing would leave no time for anything else.
MESSAGE_SECONDS = 2.5e-4


class Turns:
    """Streams take turns, where there are many a few in each step: writing to all at once delays the next step."""

    def __init__(self) -> None:
        # Whose turn is next, first.
        self._order: deque[Generation] = deque()
        # When some were told last, and later by what their writing took: that counts as no time for more of it, or a
        # loop that is late would write more and be later.
        self._since = 0.0
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, generation: Generation) -> None:
        """It takes turns from now on."""
        self._order.append(generation)

    def leave(self, generation: Generation) -> None:
        """It takes no turn any more."""
        self._order.remove(generation)

    def take(self) -> None:
        """There are new tokens: tells those whose turn it is, and the others later if none follow."""
        due = int((time.monotonic() - self._since) / MESSAGE_SECONDS)
        if due:
            self._tell(due)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left = len(self._order)
        if due < left:
            self._timer = asyncio.get_running_loop().call_later(left * MESSAGE_SECONDS, self._tell, left)

    def _tell(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self._since = time.monotonic()
        # Before and behind the tasks that are woken here.
        loop.call_soon(self._begin)
        for _ in range(min(count, len(self._order))):
            generation = self._order[0]
            self._order.rotate(-1)
            if generation.has_news:
                generation.announce()
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._began = time.monotonic()

    def _end(self) -> None:
        self._since += time.monotonic() - self._began
