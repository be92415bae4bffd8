"""The time of a step's work on the device, and the idle time before it."""

import time
from typing import Any, Protocol

import torch


class Span(Protocol):
    """One step's time on the device."""

    def begin(self) -> None:
        """Called before the step's first work on a GPU is launched; further calls do nothing.

        What the host prepares until then leaves a GPU idle if the previous step has ended.
        """
        ...

    def end(self) -> None:
        """Called when all of the step's work has been launched."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the device has done all of the step's work; does not wait."""
        ...

    def seconds(self, waited: float = 0.0) -> tuple[float, float]:
        """Returns the time of the step's work and the idle time before it; waits for the device.

        waited: seconds that the host waited for copies before the step's work, which count as idle if nothing ran.
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
        self._last = kind(self._last)
        return self._last  # type: ignore[no-any-return]


class _HostSpan:
    _end: float

    def __init__(self, before: "_HostSpan | None") -> None:
        self._start = self._end = time.perf_counter()
        self._idle = 0.0 if before is None else self._start - before._end

    def begin(self) -> None:
        """Nothing to do: preparing is work of the CPU, too."""

    def end(self) -> None:
        self._end = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return True

    def seconds(self, waited: float = 0.0) -> tuple[float, float]:
        return max(0.0, self._end - self._start - waited), self._idle + waited


class _CudaSpan:
    _end: torch.cuda.Event

    def __init__(self, before: "_CudaSpan | None") -> None:
        self._before = None if before is None else before._end
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begun = False

    def begin(self) -> None:
        # An event is reached at once if the device is idle, however late the work after the event is launched.
        if not self._begun:
            self._start.record()
            self._begun = True

    def end(self) -> None:
        self.begin()
        self._end.record()

    @property
    def is_over(self) -> bool:
        try:
            return bool(self._end.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            # The device has failed for good: `seconds` raises the error where it is expected.
            return True

    def seconds(self, waited: float = 0.0) -> tuple[float, float]:  # noqa: ARG002
        # The work began after the wait: the device was idle meanwhile, or still computed the previous step.
        self._end.synchronize()
        idle = 0.0 if self._before is None else max(0.0, self._before.elapsed_time(self._start))
        return self._start.elapsed_time(self._end) / 1e3, idle / 1e3
