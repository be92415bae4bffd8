"""A Redis for tests: the same server as run-stack starts."""

import os
import signal
from pathlib import Path

from redis_server import redis_child, redis_url, wait_until_answering


class LocalRedis:
    """A server that keeps its data in a folder over a stop. Runs from its creation on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.url = redis_url(folder)
        self._child = redis_child(folder, folder / "redis.log")
        self.start()

    def start(self) -> None:
        """Starts it again, unless it runs."""
        if not self.is_running:
            self._child.start()
            wait_until_answering(self._child, self.url)

    def stop(self) -> None:
        """Ends the server in order; all acknowledged data is kept."""
        self._child.terminate()
        self._child.wait()

    def kill(self) -> None:
        """Kills the server. A write that waits for a running fsync may be lost, though it was acknowledged."""
        self._child.kill()
        self._child.wait()

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self._child.pid, signal.Signals(number))

    @property
    def pid(self) -> int:
        """Number of the process that was started last."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._child.has_started and not self._child.ended()
