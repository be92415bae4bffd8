"""The meter of the fuzz sees the memory and time of a process, without what it had before."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fuzz.meter import MAX_BYTES, MAX_LOOP_SECONDS, Meter, Probe
from tests.fuzz.report import Report

# Does the work that each line names, and reports its end.
CODE = """
import sys, time
for line in sys.stdin:
    kind, size = line.split()
    if kind == "memory":
        bytes(bytearray(int(size)))
    elif kind == "compute":
        end = time.thread_time() + float(size)
        while time.thread_time() < end: pass
    else:
        time.sleep(float(size))
    print("done", flush=True)
"""


class Waiting(Probe):
    """Of a process that answers no call."""

    def slowest(self, process: str) -> float:
        return 60.0


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()


def test_an_expensive_call_is_a_fault_and_a_waiting_call_is_not(child: "subprocess.Popen[str]", tmp_path: Path) -> None:
    stage: Any = SimpleNamespace(stack=SimpleNamespace(pid=lambda _: child.pid))
    report = Report(1, tmp_path)
    meter = Meter(stage, report, Waiting({}))
    for work, is_fault in (
        (f"memory {MAX_BYTES}", True),
        (f"memory {MAX_BYTES // 4}", False),
        (f"compute {MAX_LOOP_SECONDS * 1.1}", True),
        (f"compute {MAX_LOOP_SECONDS / 4}", False),
        (f"wait {MAX_LOOP_SECONDS * 1.5}", False),
    ):
        before, name = report.num_faults, work.split()[0]
        readings = meter.begin()
        assert child.stdin is not None
        assert child.stdout is not None
        print(work, file=child.stdin, flush=True)
        assert child.stdout.readline() == "done\n"
        meter.end(readings, name, work, {})
        assert (report.num_faults > before) == is_fault, work
    assert report.rows["memory"].most_bytes > MAX_BYTES
    assert report.rows["compute"].most_loop_seconds > MAX_LOOP_SECONDS
