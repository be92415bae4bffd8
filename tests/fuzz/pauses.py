"""Notices that this process stood still, most likely with all other processes, because the machine was paused."""

from __future__ import annotations

import threading
import time

_LOOK_SECONDS = 0.5
# No load keeps a thread from running for so long.
_PAUSE_SECONDS = 15.0


class Pauses:
    """Looks from its start on, for as long as the process lives."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._ended = float("-inf")
        self.count = 0
        threading.Thread(target=self._look, name="pauses", daemon=True).start()

    def any_since(self, begin: float) -> bool:
        """Whether there was one since a time of the monotonic clock, which runs on in a pause."""
        return self._ended >= begin or time.monotonic() - self._looked > _PAUSE_SECONDS

    def _look(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._looked > _PAUSE_SECONDS:
                self._ended = now
                self.count += 1
            self._looked = now
            time.sleep(_LOOK_SECONDS)
