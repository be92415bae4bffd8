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
    left = [port for port in ports_of(os.environ.get("PYTEST_XDIST_WORKER", "")) if port not in _given]
    # Other runs on this machine draw from the same range: where they begin must not be known.
    for port in random.SystemRandom().sample(left, len(left)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise RuntimeError("this process has used all its ports")


def free_address() -> str:
    """host:port on which no process listens at the moment."""
    return f"127.0.0.1:{free_port()}"


def free_addresses(count: int) -> list[str]:
    """Free addresses of servers that may take FOLLOWING ports after their own: no two meet."""
    ports: list[int] = []
    while len(ports) < count:
        port = free_port()
        if all(abs(port - other) > FOLLOWING for other in ports):
            ports.append(port)
    return [f"127.0.0.1:{port}" for port in ports]
