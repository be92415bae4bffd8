"""The cost of one request for each process: peak memory, and the time for which the request blocks the event loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.rpc.channel import open_sync_channel
from tests.fuzz.report import Report
from tests.stack import MODULES
from tests.support.patience import patience, speed_factor

if TYPE_CHECKING:
    from tests.fuzz.stage import Stage

MAX_BYTES = 64 << 20
# Processor time, of which a slower processor needs more.
MAX_LOOP_SECONDS = 0.3 * speed_factor()
PROBE_SECONDS = patience(60)
PROBE_PAUSE = 0.02


@dataclass(frozen=True)
class _Reading:
    process: Path
    resident_bytes: int
    loop_seconds: float


class Probe:
    """Asks each process again and again for its health, as callers do that must not wait."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        # Since `begin`, by process; and the question that has no answer yet.
        self._slowest: dict[str, float] = {}
        self._asking: tuple[str, float] = ("", 0.0)
        threading.Thread(target=self._ask, name="probe", daemon=True).start()

    def begin(self) -> None:
        """Forgets the earlier measurements."""
        self._slowest = {}

    def slowest(self, process: str) -> float:
        """The longest wait for an answer since `begin`, in seconds."""
        asked, since = self._asking
        waiting = time.monotonic() - since if asked == process else 0.0
        return max(self._slowest.get(process, 0.0), waiting)

    def _ask(self) -> None:
        channels = {name: open_sync_channel(address) for name, address in self._addresses.items()}
        while True:
            for name, channel in channels.items():
                self._asking = name, time.monotonic()
                with contextlib.suppress(grpc.RpcError):
                    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
                seconds, slowest = time.monotonic() - self._asking[1], self._slowest
                self._asking = "", 0.0
                slowest[name] = max(slowest.get(name, 0.0), seconds)
            time.sleep(PROBE_PAUSE)


class Meter:
    """For requests that are sent one at a time.

    What is read is the kernel's: no other process's work counts. A loop that works as long without a stop for others
    keeps them waiting too, which the probe sees; a stream of many small answers does not.
    """

    def __init__(self, stage: Stage, report: Report, probe: Probe | None = None) -> None:
        self._stage = stage
        self._report = report
        self._probe = probe or Probe({name: getattr(stage.stack, name) for name in MODULES})

    def begin(self) -> list[_Reading]:
        """Before a request."""
        self._probe.begin()
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
            stall = min(seconds, self._probe.slowest(process))
            self._report.cost(name, grown, seconds, stall)
            if grown > MAX_BYTES or stall > MAX_LOOP_SECONDS:
                cost = f"{grown / 1e6:.0f} MB and {stall:.3f} of {seconds:.3f} s of the loop of the {process}"
                self._report.fault(f"cost of {name}", f"{cost}\n{text}", call)


def _read(process: Path) -> _Reading | None:
    try:
        # Resets the peak.
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
