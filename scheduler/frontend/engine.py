"""What runs the samples of the request table: an engine here or in another process, or a router's engines."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scheduler.bridge import AdmissionQueue, Cancel, CommandQueue
from scheduler.metrics import StepLoad, StepTimes
from scheduler.request import AdmissionAttempt


@dataclass(frozen=True, slots=True)
class Loads:
    """The load of an engine: samples in its running batch and in its waiting queue, and the load of its steps.

    max_running: most samples of the running batch. In a router: samples sent to engines, samples that wait for an
    engine, and the engines' max_running together.
    """

    running: int
    waiting: int
    max_running: int
    steps: StepLoad


class Engine(Protocol):
    """Runs samples, and reports their outcomes to the RequestTable. On the asyncio loop."""

    @property
    def loads(self) -> Loads:
        """The load at the moment."""

    def start(self, attempt: AdmissionAttempt) -> None:
        """Queues a sample, whose output continues after the attempt's token ids."""

    def cancel(self, arrival: int) -> None:
        """Ends a sample and frees what it holds; does nothing for an unknown sample, which has already ended."""

    def weight_version(self, arrival: int) -> str | None:
        """Returns the version of the weights that a sample is computed with; None if the version is not known."""


class LocalEngine:
    """The engine in this process: its waiting queue, and the commands to its step loop."""

    def __init__(
        self,
        queue: AdmissionQueue,
        commands: CommandQueue,
        times: StepTimes,
        weight_version: Callable[[], str],
        *,
        max_running: int,
    ) -> None:
        """weight_version: returns the version of the weights that samples are computed with at present."""
        self._queue = queue
        self._commands = commands
        self._times = times
        self._weight_version = weight_version
        self._max_running = max_running

    @property
    def loads(self) -> Loads:
        running = self._queue.num_running
        steps = self._times.load if running else self._times.load._replace(prefill_tokens=0)
        return Loads(running, len(self._queue), self._max_running, steps)

    def start(self, attempt: AdmissionAttempt) -> None:
        self._queue.push(attempt)

    def cancel(self, arrival: int) -> None:
        if not self._queue.remove(arrival):
            self._commands.put(Cancel(arrival))

    def weight_version(self, arrival: int) -> str:  # noqa: ARG002
        return self._weight_version()
