"""When streams hear of their tokens. On the asyncio loop."""

import asyncio
import math
from collections import deque

from scheduler.generation import Generation

# Every stream gets a message as often as one such time for each stream has passed: with few streams that is for every
# token, with very many for several at once, or writing would leave no time for anything else.
MESSAGE_SECONDS = 2.5e-4


class Turns:
    """Streams take turns, where there are many a few in each step: writing to all at once delays the next step."""

    def __init__(self) -> None:
        # Whose turn is next, first.
        self._order: deque[Generation] = deque()
        # When those who were told last had written; infinite while they write. What writing takes does not count as
        # time for more of it, or a loop that is late would write more and be later.
        self._written_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, generation: Generation) -> None:
        """It takes turns from now on."""
        self._order.append(generation)

    def leave(self, generation: Generation) -> None:
        """It takes no turn any more."""
        self._order.remove(generation)

    def take(self) -> None:
        """There are new tokens: tells those whose turn it is, and the others later if none follow."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = int(max(0.0, now - self._written_at) / MESSAGE_SECONDS)
        if due:
            self._tell(due)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left = len(self._order)
        if due < left:
            self._timer = loop.call_later(left * MESSAGE_SECONDS, self._tell, left)

    def _tell(self, count: int) -> None:
        for _ in range(min(count, len(self._order))):
            generation = self._order[0]
            self._order.rotate(-1)
            if generation.has_news:
                generation.announce()
        self._written_at = math.inf
        # Behind the tasks that have just been woken.
        asyncio.get_running_loop().call_soon(self._note_written)

    def _note_written(self) -> None:
        self._written_at = asyncio.get_running_loop().time()
