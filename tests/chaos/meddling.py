"""Troubles of messages in networks: a proxy asks this module what happens to each message."""

from __future__ import annotations

import asyncio
import enum
import random
from collections import Counter
from collections.abc import Awaitable, Callable

# Seconds by which a message is delayed, and seconds before a message is repeated.
DELAYS = (0.01, 0.5)
AGAIN = (0.0, 0.3)
# Delays of messages in a stream, which are short because each message delays all later messages.
STREAM_DELAYS = (0.0, 0.1)


class Trouble(enum.StrEnum):
    """What can happen to a call."""

    DELAY = "delay"
    # The server never receives it.
    LOSE_REQUEST = "lose request"
    # The server has carried out the call.
    LOSE_ANSWER = "lose answer"
    # The server receives the call twice, as from a client that repeats a call without an answer.
    REPEAT = "repeat"


class ConnectionLostError(Exception):
    """The call's connection breaks."""


class Meddling:
    """Meddles with no call while `shares` is empty. A call meets at most one trouble."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        # The share of calls that meet each trouble, 0..1.
        self.shares: dict[Trouble, float] = {}
        # Calls that met each trouble so far.
        self.met: Counter[Trouble] = Counter()

    async def carry(self, ask: Callable[[], Awaitable[bytes]]) -> bytes:
        """Answers a call by asking the server. Raises what `ask` raises, and ConnectionLostError.

        A call whose messages are dropped in silence is never answered: the caller's deadline ends it.
        """
        trouble = self._draw()
        if trouble is None:
            return await ask()
        self.met[trouble] += 1
        match trouble:
            case Trouble.DELAY:
                await asyncio.sleep(self._rng.uniform(*DELAYS))
                answer = await ask()
                await asyncio.sleep(self._rng.uniform(*DELAYS))
                return answer
            case Trouble.REPEAT:
                await asyncio.gather(ask(), return_exceptions=True)
                await asyncio.sleep(self._rng.uniform(*AGAIN))
                return await ask()
            case Trouble.LOSE_ANSWER:
                await ask()
        if self._rng.random() < 0.5:
            await asyncio.Event().wait()
        raise ConnectionLostError

    async def delay_in_stream(self) -> None:
        """Waits for the delay of the next message of a stream."""
        share = self.shares.get(Trouble.DELAY, 0.0)
        if share and self._rng.random() < share:
            await asyncio.sleep(self._rng.uniform(*STREAM_DELAYS))

    def _draw(self) -> Trouble | None:
        drawn = self._rng.random()
        for trouble, share in self.shares.items():
            if drawn < share:
                return trouble
            drawn -= share
        return None
