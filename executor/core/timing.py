"""The time of a step's work on the device, and the idle time before it."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Span(Protocol):
    """One step's time on the device."""

    def end(self) -> None:
        """Called when all of the step's work has been launched."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the device has done all of the step's work; does not wait."""
        ...

    def seconds(self) -> tuple[float, float]:
        """Returns the time of the step's work and the idle time before it; waits for the device.

        The time in which the host waited for copies and nothing was computed is idle time.
        """
        ...


class Clock:
    """Makes one span per step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: Any = None

    def clear(self) -> None:
        """Forgets the last span: a failed step has no end from which idle time could count."""
        self._last = None

    def start(self) -> Span:
        """Starts the span of a step. On a CPU, the step's work begins now."""
        kind = _CudaSpan if self._device.type == "cuda" else _HostSpan
        self._last = span = kind(self._last)
        return span

    def begin(self) -> None:
        """Called before copies, evictions and the forward pass of the last step are launched: the first call counts.

        What the host prepares until then leaves a GPU idle if the previous step has ended, although inputs, and counts
        of tokens for penalties, may be sent earlier.
        """
        if self._last is not None:
            self._last.begin()

    def waiting(self) -> AbstractContextManager[None]:
        """Encloses a wait of the host for copies, in which nothing is launched; between steps, a wait has no effect."""
        return nullcontext() if self._last is None or self._last.ended else self._last.waiting()


class _HostSpan:
    _end: float
    ended = False

    def __init__(self, before: "_HostSpan | None") -> None:
        self._start = self._end = time.perf_counter()
        self._idle = 0.0 if before is None else self._start - before._end
        self._waited = 0.0

    def begin(self) -> None:
        """Nothing to do: preparing is work of the CPU, too."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    def end(self) -> None:
        self._end = time.perf_counter()
        self.ended = True

    @property
    def is_over(self) -> bool:
        return True

    def seconds(self) -> tuple[float, float]:
        return max(0.0, self._end - self._start - self._waited), self._idle + self._waited


class _CudaSpan:
    _end: torch.cuda.Event
    ended = False

    def __init__(self, before: "_CudaSpan | None") -> None:
        self._before = None if before is None else before._end
        self._start, self._end = _event(), _event()
        self._begun = False
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        # An event is reached at once if the device is idle, however late the work after the event is launched.
        if not self._begun:
            self._start.record()
            self._begun = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        # Before the first work, the start of the span tells how long the device was idle.
        if not self._begun:
            yield
            return
        done, launching = _event(), _event()
        done.record()
        yield
        launching.record()
        self._waits.append((done, launching))

    def end(self) -> None:
        self.begin()
        self._end.record()
        self.ended = True

    @property
    def is_over(self) -> bool:
        try:
            return bool(self._end.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            # The device has failed for good: `seconds` raises the error where it is expected.
            return True

    def seconds(self) -> tuple[float, float]:
        self._end.synchronize()
        before = 0.0 if self._before is None else max(0.0, self._before.elapsed_time(self._start))
        within = sum(done.elapsed_time(launching) for done, launching in self._waits)
        return (self._start.elapsed_time(self._end) - within) / 1e3, (before + within) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
