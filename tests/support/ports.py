"""Ports for the servers of tests."""

import contextlib
import os
import random
import socket

# Outside of the system's range for clients, so that no connection of another test takes a port before its server.
FIRST, END = 10_000, 32_768
# Number of workers of pytest with separate ranges: two such workers never draw the same port.
RANGES = 12
# Servers with several ports may also take this number of ports after their own port.
FOLLOWING = 16
# Ports that this process has given to tests.
_given: set[int] = set()


def ports_of(worker: str) -> range:
    """The ports of a worker by its name, "gw0" for the first; other processes have the last range."""
    width = (END - FIRST) // RANGES
    number = int(worker.removeprefix("gw")) % (RANGES - 1) if worker else RANGES - 1
    return range(FIRST + number * width, FIRST + (number + 1) * width - FOLLOWING)


def free_port() -> int:
    """A port of 127.0.0.1 on which no process listens at the moment. No port is given twice."""
    left = [port for port in ports_of(os.environ.get("PYTEST_XDIST_WORKER", "")) if port not in _given]
    # Other runs on this machine draw from the same range, so the first port must be random.
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
    """Free addresses of servers that may take FOLLOWING ports after their own, without a common port."""
    ports: list[int] = []
    while len(ports) < count:
        port = free_port()
        if all(abs(port - other) > FOLLOWING for other in ports):
            ports.append(port)
    return [f"127.0.0.1:{port}" for port in ports]
