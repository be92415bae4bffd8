"""What a scheduler and a front end in a separate process send each other: frames over a pair of sockets.

All messages go over this pair; only counted metrics go through files. When the pair closes, the other process has
ended: no front end outlives its scheduler.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct

_HEAD = struct.Struct("<BI")


class Frame(enum.IntEnum):
    """Kinds of frames: what follows the head."""

    # From the scheduler, once it serves: generation.v1.GetEngineResponse.
    ENGINE = 1
    # generation.v1.StreamRequestsRequest to the scheduler, StreamRequestsResponse from it.
    REQUESTS = 2
    # Empty to the scheduler, which answers with the text of all metrics.
    METRICS = 3
    # generation.v1.AbortRequestsRequest to the scheduler, which answers with AbortRequestsResponse.
    ABORT = 5
    # From the scheduler: the front end ends once its callers have their answers. If a byte follows, it fails requests.
    STOP = 4


class Pipe:
    """One end of the pair. Only one task at a time may `read`; any task may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connected: socket.socket) -> Pipe:
        """Creates a pipe over a connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=connected))

    async def read(self) -> tuple[Frame, bytes] | None:
        """Returns the next frame; None if the other process has ended, or has closed its end."""
        try:
            kind, size = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            return Frame(kind), await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def put(self, kind: Frame, content: bytes = b"") -> None:
        """Sends a frame; never blocks."""
        self._writer.write(_HEAD.pack(kind, len(content)) + content)

    async def send(self, kind: Frame, content: bytes = b"") -> None:
        """Sends a frame; waits while too much is unread. Raises ConnectionError if the other process has ended."""
        self.put(kind, content)
        await self._writer.drain()

    def close(self) -> None:
        """Closes the pipe: the other end reads no more frames."""
        self._writer.close()
