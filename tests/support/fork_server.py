"""Forks processes that have imported their modules: `python -m tests.support.fork_server MODULE SOCKET PARENT`.

MODULE: one of IMPORTS, which each fork runs as `python -m MODULE` would. SOCKET: number of a file. Over it, requests
come, each with the file of a log; the numbers of the forks and their endings go back. PARENT: number of the
process whose end also ends this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The imports of each process before it serves. Each fork makes further imports by itself.
IMPORTS = {
    "cachemgr": ("cachemgr.__main__", "cachemgr.process", "protos.rpc.metrics_server"),
    "executor": (
        "executor.__main__",
        "executor.process",
        "executor.parts",
        "transformers.models.llama.modeling_llama",
    ),
    "scheduler": ("scheduler.__main__", "scheduler.process", "protos.rpc.metrics_server"),
}
MESSAGE_BYTES = 1 << 17
_SIGNAL_WHEN_PARENT_DIES = 1


def _serve(module: str, connection: socket.socket) -> None:
    """Forks a process for each request until the other end is closed. In a fork it returns."""
    # numpy's threads end before a fork and begin again after it; threads of other modules would not.
    importlib.import_module("numpy")
    threads = _count_threads()
    for name in IMPORTS[module]:
        importlib.import_module(name)
    assert _count_threads() == threads, "a process with threads cannot be forked"
    # The module runs in each fork as if it had not been imported.
    sys.modules.pop(f"{module}.__main__")
    gc.collect()
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([connection.fileno(), awake], [], [])[0]
        if awake in ready:
            os.read(awake, 512)
            for pid, code in _ended():
                connection.send(json.dumps({"pid": pid, "code": code}).encode())
        if connection.fileno() in ready:
            data, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
            if not data:
                # At a normal exit, libraries would report leaks.
                os._exit(0)
            server, pid = os.getpid(), os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for file in (awake, wake):
                    os.close(file)
                connection.close()
                _become(json.loads(data), files[0], server)
                return
            os.close(files[0])
            connection.send(json.dumps({"forked": pid}).encode())


def _count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _ended() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((one[0], os.waitstatus_to_exitcode(one[1])))
    return found


def _become(request: Mapping[str, Any], log: int, server: int) -> None:
    os.setpgid(0, 0)
    _die_with(server)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for file in (1, 2):
        os.dup2(log, file)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_SIGNAL_WHEN_PARENT_DIES, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Serves; returns in each fork after its module has run."""
    module, file, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _die_with(parent)
    connection = socket.socket(fileno=file)
    _serve(module, connection)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
