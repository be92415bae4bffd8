"""The connections of one listener: when there are too many, those without a call make room for others.

gRPC itself can only refuse connections that come. Callers that connect, ask nothing and connect again would shut
everybody else out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import structlog

from protos.rpc.metrics import CLOSED_CONNECTIONS

# How often open files are counted: usually, and once connections had to be closed.
COUNT_SECONDS, CROWDED_SECONDS = 0.5, 0.05
# A flood is one line in the log each time.
LOG_SECONDS = 10.0
_OPEN_FILES = Path("/proc/self/fd")

log = structlog.get_logger()


class Peer(NamedTuple):
    """The other end of a TCP connection."""

    host: str
    port: int


class _File(NamedTuple):
    """An open file. inode: tells it from a later one with its number. peer: None for what is no connection."""

    inode: int
    peer: Peer | None


class Connections:
    """Counts the calls of each connection of a listener, and closes connections without one."""

    def __init__(self, server: str, most: int) -> None:
        """server: its name in the log and in metrics. most: gRPC lets in twice as many, until some are closed."""
        self._server = server
        self._most = most
        # By the text that gRPC has for a peer.
        self._calls: Counter[str] = Counter()
        # Open files by their numbers, in the order in which they were found.
        self._files: dict[int, _File] = {}
        self._closed = 0
        self._logged_at = -LOG_SECONDS

    @contextlib.contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """Around a call: its connection stays."""
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    async def keep_room(self, port: int) -> None:
        """Closes the oldest connections without a call while there are too many. Runs until it is cancelled."""
        while True:
            crowded = False
            # Any exception: a listener that is guarded no longer would be shut by the next flood.
            try:
                if _count_files() > self._most:
                    crowded = await self._make_room(port)
                else:
                    self._files.clear()
            except Exception:
                log.exception("connections could not be counted", server=self._server)
            await asyncio.sleep(CROWDED_SECONDS if crowded else COUNT_SECONDS)

    async def _make_room(self, port: int) -> bool:
        """Whether there were too many. Then a quarter fewer than may be are left, unless calls run on more."""
        await asyncio.to_thread(self._find, port)
        found = {number: file for number, file in self._files.items() if file.peer is not None}
        if len(found) <= self._most:
            return False
        busy = {peer_of(text) for text in self._calls}
        idle = [(number, file) for number, file in found.items() if file.peer not in busy]
        wanted = len(found) - (self._most - self._most // 4)
        await asyncio.to_thread(_close, idle[:wanted])
        self._count(len(idle[:wanted]))
        return True

    def _find(self, port: int) -> None:
        """Brings `_files` up to date."""
        before, after = self._files, dict[int, _File]()
        for number in _open_files():
            # A file may be closed at any moment.
            with contextlib.suppress(OSError):
                known, inode = before.get(number), os.fstat(number).st_ino
                after[number] = known if known and known.inode == inode else _File(inode, _peer(number, port))
        # A file number that a new connection has got counts from now on.
        same = {number: file for number, file in before.items() if after.get(number) is file}
        self._files = same | after

    def _count(self, closed: int) -> None:
        CLOSED_CONNECTIONS.labels(self._server).inc(closed)
        self._closed += closed
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            log.warning(
                "connections without a call were closed to make room", server=self._server, connections=self._closed
            )
            self._logged_at, self._closed = now, 0


def _open_files() -> list[int]:
    """Their numbers; none where the system does not list them."""
    try:
        # A Path for each would take longer than all the rest.
        return [int(name) for name in os.listdir(_OPEN_FILES)]  # noqa: PTH208
    except FileNotFoundError:
        return []


def _count_files() -> int:
    """How many are open. Linux says it at once since 6.2."""
    return (_OPEN_FILES.stat().st_size if _OPEN_FILES.exists() else 0) or len(_open_files())


def _peer(number: int, port: int) -> Peer | None:
    """Of a connection that the listener of a port has accepted; None for another file. Raises OSError."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return None
    # A copy, as gRPC may close the file at any moment, and its number may become that of another one.
    with socket.socket(fileno=os.dup(number)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != port:
            return None
        try:
            host, remote_port = one.getpeername()[:2]
        except OSError:
            # The listener itself, or one that is closed.
            return None
        return Peer(_normal(host), remote_port)


def _close(connections: Iterable[tuple[int, _File]]) -> None:
    """gRPC sees their ends and closes the files."""
    for number, file in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if os.fstat(one.fileno()).st_ino == file.inode:
                one.shutdown(socket.SHUT_RDWR)


def peer_of(text: str) -> Peer | None:
    """Of gRPC's "ipv4:127.0.0.1:50000" or "ipv6:%5B::1%5D:50000"; None for one that has no port."""
    kind, _, rest = text.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return Peer(_normal(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") else None


def _normal(host: str) -> str:
    """One text for each address; gRPC and the socket may write it in other ways."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
