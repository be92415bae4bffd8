"""What one request costs each process: memory at its peak, and time of its event loop, in which all others wait."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.report import Report
from tests.stack import MODULES

if TYPE_CHECKING:
    from tests.fuzz.stage import Stage

MAX_BYTES = 64 << 20
MAX_LOOP_SECONDS = 0.3


@dataclass(frozen=True)
class _Reading:
    process: Path
    resident_bytes: int
    loop_seconds: float


class Meter:
    """For requests that are sent one at a time. What is read is the kernel's: nobody else's work counts."""

    def __init__(self, stage: Stage, report: Report) -> None:
        self._stage = stage
        self._report = report

    def begin(self) -> list[_Reading]:
        """Before a request."""
        return [reading for name in MODULES if (reading := _read(Path("/proc", str(self._stage.stack.pid(name)))))]

    def end(self, begin: list[_Reading], name: str, text: str, call: dict[str, object]) -> None:
        """Behind a request of this name; text: what it was, in words."""
        for process, before in zip(MODULES, begin, strict=False):
            try:
                peak, loop_seconds = _memory(before.process, "VmHWM"), _loop_seconds(before.process)
            except OSError:
                # A process that has ended is a fault of another kind.
                continue
            grown, seconds = peak - before.resident_bytes, loop_seconds - before.loop_seconds
            self._report.cost(name, grown, seconds)
            if grown > MAX_BYTES or seconds > MAX_LOOP_SECONDS:
                cost = f"{grown / 1e6:.0f} MB and {seconds:.3f} s of the loop of the {process}"
                self._report.fault(f"cost of {name}", f"{cost}\n{text}", call)


def _read(process: Path) -> _Reading | None:
    try:
        # The peak begins anew.
        (process / "clear_refs").write_text("5")
        return _Reading(process, _memory(process, "VmRSS"), _loop_seconds(process))
    except OSError:
        return None


def _memory(process: Path, name: str) -> int:
    status = (process / "status").read_text()
    return int(status.partition(f"\n{name}:")[2].split(maxsplit=1)[0]) << 10


def _loop_seconds(process: Path) -> float:
    """Time that the first thread has run, in which each process has its loop."""
    return int((process / "task" / process.name / "schedstat").read_text().split(maxsplit=1)[0]) / 1e9
