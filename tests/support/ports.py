"""Ports for the servers of tests."""

import contextlib
import os
import random
import socket

# None of those that the system gives to clients: a connection of another test would take a port before its server.
FIRST, END = 10_000, 32_768
# Workers of pytest that have a range of their own: two of them never draw the same port.
RANGES = 12
# Servers with several ports may also take some that follow their own.
FOLLOWING = 16
# Ports that this process has given to tests.
_given: set[int] = set()


def ports_of(worker: str) -> range:
    """The ports of a worker by its name, "gw0" for the first; a process that is no worker has those after the last."""
    width = (END - FIRST) // RANGES
    number = int(worker.removeprefix("gw")) % (RANGES - 1) if worker else RANGES - 1
    return range(FIRST + number * width, FIRST + (number + 1) * width - FOLLOWING)


def free_port() -> int:
    """A port of 127.0.0.1 on which no process listens at the moment. No port is given twice."""
    mine = ports_of(os.environ.get("PYTEST_XDIST_WORKER", ""))
    while True:
        # Other runs on this machine draw from the same range: where they begin must not be known.
        port = random.SystemRandom().choice(mine)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def free_address() -> str:
    """host:port on which no process listens at the moment."""
    return f"127.0.0.1:{free_port()}"
