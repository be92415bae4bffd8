"""The connections of one listener: if there are too many, connections without a call are closed to make room.

gRPC itself can only refuse new connections. Callers that keep connecting without any request would lock everybody
else out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import resource
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import structlog

from protos.rpc.logs import Summaries
from protos.rpc.metrics import CLOSED_CONNECTIONS

# Seconds between counts of open files: usually, and for CALM_SECONDS after there were too many.
COUNT_SECONDS, CROWDED_SECONDS, CALM_SECONDS = 0.5, 0.02, 5.0
# At most this share of the time is spent on looking at connections.
_SHARE = 0.2
# How many connections are closed before other tasks get their turn.
_AT_ONCE = 64
_OPEN_FILES = Path("/proc/self/fd")

log = structlog.get_logger()


class Peer(NamedTuple):
    """The other end of a TCP connection."""

    host: str
    port: int


class _File(NamedTuple):
    """An open file. inode: differs from that of a later file with the same number. peer: None if no connection."""

    inode: int
    peer: Peer | None


class Connections:
    """Knows the calls of each connection of a listener, and closes connections without a call."""

    def __init__(self, server: str, most: int) -> None:
        """server: its name in the log and in metrics. most: the limit; gRPC briefly admits twice as many."""
        self._server = server
        self._most = most
        # Running calls by peer; and the peers that have called, the most recent last.
        self._calls: Counter[Peer | None] = Counter()
        self._called: dict[Peer | None, None] = {}
        # Open files by number, in the order in which they were found.
        self._files: dict[int, _File] = {}
        self._closed = 0
        self._summaries = Summaries()

    @contextlib.contextmanager
    def calling(self, text: str) -> Iterator[None]:
        """Wraps a call, so that its connection stays open. text: gRPC's name of the peer."""
        peer = peer_of(text)
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
            self._called.pop(peer, None)
            self._called[peer] = None
            if len(self._called) > 2 * self._most:
                del self._called[next(iter(self._called))]

    async def keep_room(self, port: int) -> None:
        """Closes connections without a call while there are too many. Runs until it is cancelled.

        Connections that never had a call are closed first, oldest first; then connections in the order of their last
        call, oldest first.
        """
        crowded_at = -CALM_SECONDS
        while True:
            begun = time.monotonic()
            # Any exception: without this guard, the next flood would lock out the listener.
            try:
                if _count_files() <= self._most:
                    self._files.clear()
                elif await self._make_room(port):
                    crowded_at = begun
            except Exception:
                log.exception("connections could not be counted", server=self._server)
            now = time.monotonic()
            pause = CROWDED_SECONDS if now < crowded_at + CALM_SECONDS else COUNT_SECONDS
            await asyncio.sleep(max(pause, (now - begun) / _SHARE))

    async def _make_room(self, port: int) -> bool:
        """If there are too many connections, closes some without a call; returns whether there were too many.

        Leaves three quarters of the limit, or more if fewer than a quarter of the limit would be left without a call.
        """
        await asyncio.to_thread(self._find, port)
        found = [(number, file) for number, file in self._files.items() if file.peer is not None]
        if len(found) <= self._most:
            return False
        places = {peer: place for place, peer in enumerate(self._called, 1)}
        idle = [(number, file) for number, file in found if file.peer not in self._calls]
        idle.sort(key=lambda one: places.get(one[1].peer, 0))
        quarter = self._most // 4
        wanted = max(0, min(len(found) - (self._most - quarter), len(idle) - quarter))
        victims, closed = idle[:wanted], 0
        for begin in range(0, len(victims), _AT_ONCE):
            for number, file in victims[begin : begin + _AT_ONCE]:
                # Calls may have begun since the connections were counted.
                closed += file.peer not in self._calls and _close(number, file)
            await asyncio.sleep(0)
        self._count(closed)
        return True

    def _find(self, port: int) -> None:
        """Brings `_files` up to date."""
        before, after = self._files, dict[int, _File]()
        for number in _open_files():
            # A file may be closed at any moment.
            with contextlib.suppress(OSError):
                known, inode = before.get(number), os.fstat(number).st_ino
                after[number] = known if known and known.inode == inode else _File(inode, _peer(number, port))
        # If a new connection has reused a file number, it counts as new.
        same = {number: file for number, file in before.items() if after.get(number) is file}
        self._files = same | after

    def _count(self, closed: int) -> None:
        CLOSED_CONNECTIONS.labels(self._server).inc(closed)
        self._closed += closed
        if self._closed and self._summaries.is_due():
            log.warning(
                "connections without a call were closed to make room", server=self._server, connections=self._closed
            )
            self._closed = 0


def _open_files() -> Iterable[int]:
    """Numbers of open files, perhaps too many if no file can be opened; none if the system does not list them."""
    try:
        # A Path for each would take longer than everything else.
        return [int(name) for name in os.listdir(_OPEN_FILES)]  # noqa: PTH208
    except FileNotFoundError:
        return ()
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _count_files() -> int:
    """The number of open files; perhaps more if no file can be opened, and 0 if the system does not list files.

    Linux reports the number at once from 6.2 on.
    """
    return (_OPEN_FILES.stat().st_size if _OPEN_FILES.exists() else 0) or len(list(_open_files()))


@contextlib.contextmanager
def _socket(number: int) -> Iterator[socket.socket]:
    """Wraps an open file as a socket and leaves it open. Needs no further file, as none may be free. Raises OSError."""
    one = socket.socket(fileno=number)
    try:
        yield one
    finally:
        one.detach()


def _peer(number: int, port: int) -> Peer | None:
    """The peer of a connection that the listener of a port has accepted; None for other files. Raises OSError."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return None
    with _socket(number) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != port:
            return None
        try:
            host, remote_port = one.getpeername()[:2]
        except OSError:
            # The listener itself, or a closed connection.
            return None
        return Peer(_normal(host), remote_port)


def _close(number: int, file: _File) -> bool:
    """Shuts down a connection; returns whether it still existed. gRPC notices, and closes the file."""
    with contextlib.suppress(OSError), _socket(number) as one:
        if os.fstat(number).st_ino == file.inode:
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


@functools.lru_cache(maxsize=1 << 14)
def peer_of(text: str) -> Peer | None:
    """Parses gRPC's "ipv4:127.0.0.1:50000" or "ipv6:%5B::1%5D:50000" as a peer; None for a peer without a port."""
    kind, _, rest = text.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return Peer(_normal(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") else None


def _normal(host: str) -> str:
    """Normalizes the text of an address, since gRPC and the socket may write it differently."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
