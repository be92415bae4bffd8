"""Processes that are forks of a process with all imports done: imports take most of a stack's start.

Tests start a hundred stacks, each of three processes. Each module that runs as a process has a server of forks, which
starts with the first such process. A fork differs from a process of its own only in its command line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from children import Child, Running

from tests.support import fork_server
from tests.support.fork_server import IMPORTS, MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]


class PreloadedChild(Child):
    """A Child whose command is `python -m MODULE`, with a module of IMPORTS."""

    def _launch(self, log: IO[bytes]) -> Running:
        return _server(self._command[-1]).fork(self._environment, self._folder, log)


def can_preload(module: str, environment: Mapping[str, str]) -> bool:
    """Whether a fork would have all variables that libraries read when they are imported.

    A server ends with the thread that started it, which must be the main one.
    """
    has_server = module in _servers or (module in IMPORTS and threading.current_thread() is threading.main_thread())
    return has_server and _of_libraries(environment) == _of_libraries(os.environ)


def _of_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    ours = ("KVKEEP_", "PYTEST_", "PYTHONPATH")
    return {name: value for name, value in environment.items() if not name.startswith(ours)}


class _Fork:
    """A process that a server has forked."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> int | None:
        return self._server.ended(self.pid)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended")
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        # A process that has ended does not exist any more: its server does not wait until its status is read.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)


class _Server:
    """The server of one module. Its forks end with the server, and the server ends with this process."""

    def __init__(self, module: str) -> None:
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", fork_server.__name__, module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=dict(os.environ),
                process_group=0,
            )

    def fork(self, environment: Mapping[str, str], folder: Path, log: IO[bytes]) -> _Fork:
        """Forks a process. Raises RuntimeError if the server has ended."""
        request = json.dumps({"environment": dict(environment), "folder": str(folder)}).encode()
        with self._lock:
            socket.send_fds(self._connection, [request], [log.fileno()])
            while (pid := self._read()) is None:
                pass
        return _Fork(self, pid)

    def ended(self, pid: int) -> int | None:
        """The status of a fork, as in subprocess; None while the fork runs."""
        with self._lock:
            while pid not in self._codes and select.select([self._connection], [], [], 0)[0]:
                self._read()
            return self._codes.get(pid)

    def close(self) -> None:
        self._connection.close()
        self._process.wait()

    def _read(self) -> int | None:
        """Reads a message: returns the number of a new fork, or None after the message that a fork has ended."""
        data = self._connection.recv(MESSAGE_BYTES)
        if not data:
            raise RuntimeError(f"the server of preloaded processes ended with status {self._process.wait()}")
        message: dict[str, int] = json.loads(data)
        if "code" in message:
            self._codes[message["pid"]] = message["code"]
        return message.get("forked")


_servers: dict[str, _Server] = {}


def _server(module: str) -> _Server:
    if module not in _servers:
        _servers[module] = _Server(module)
        atexit.register(_servers[module].close)
    return _servers[module]
