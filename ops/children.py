"""Child processes that never outlive their parent, write to a log, and are stopped within a time limit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

KILL_SECONDS = 5.0
TAIL_LINES = 20

# Runs in the child before the command, because a preexec_fn is not safe with threads: has Linux signal the child when
# the parent dies.
_BOUND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Running(Protocol):
    """A process that has been started, with methods as in subprocess.Popen."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Child:
    """A command as a process, which gets `orphan_signal` when its parent dies.

    Start the process from a thread that lives as long as the parent: Linux sends the signal when this thread ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path,
        log: Path,
        stop_seconds: float,
        orphan_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.log = log
        self._command = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), str(int(orphan_signal)), *command]
        self._environment = dict(environment)
        self._folder = folder
        self._stop_seconds = stop_seconds
        self._process: Running | None = None
        self._log_begin = 0

    def start(self) -> None:
        """Starts the command; the log continues the log of earlier starts."""
        with self.log.open("ab") as log:
            self._log_begin = log.tell()
            self._process = self._launch(log)

    def _launch(self, log: IO[bytes]) -> Running:
        return subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A Ctrl-C in the terminal is for the parent, which stops its children in order.
            process_group=0,
        )

    def ended(self) -> str:
        """How the process ended, in words; empty while it runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    @property
    def has_started(self) -> bool:
        """Whether a process was started, even if it has ended."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def terminate(self) -> None:
        """Asks the process to end. After a second call the process does not wait for running calls."""
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process and self._process.poll() is None:
            self._process.kill()

    def wait(self) -> bool:
        """Waits until the process has ended; kills a process that takes too long, and then returns False."""
        if self._process is None:
            return True
        deadline = time.monotonic() + self._stop_seconds
        # Many short waits instead of one long wait: signal handlers run between them.
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._process.poll() is not None:
            return True
        self._process.kill()
        self._process.wait(KILL_SECONDS)
        return False

    def tail(self) -> list[str]:
        """Last lines of the log since the last start."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(self._log_begin)
            return log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
