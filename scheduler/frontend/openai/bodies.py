"""Limits on arriving request bodies: how long they may take, how large one may be, and how large all together."""

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive

# Longest time for a body to arrive.
ARRIVAL_SECONDS = 30.0
# Most bytes of all bodies that arrive or are parsed; the first bytes of each body are free, so that small requests
# always fit.
HELD_BYTES, FREE_BYTES = 64 << 20, 1 << 16
# Limits the number of these marks in JSON, even in texts: parsing more values would delay every other request.
MARKS, MAX_MARKS = (b",", b":", b"[", b"{"), 1 << 19


class BodyLimits:
    """Bounds the bodies of all requests of a server."""

    def __init__(self, max_body_bytes: int) -> None:
        """max_body_bytes: limit for one body."""
        self._max_body_bytes = max_body_bytes
        self._free = max(HELD_BYTES, max_body_bytes)

    @contextlib.contextmanager
    def limiting(self, request: Request) -> Iterator[Receive]:
        """Surrounds reading of a body. Raises HTTPException for a compressed, slow or large body, or a full server."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "the body is compressed: send it without Content-Encoding")
        receive, length = request.receive, request.headers.get("content-length", "")
        until = asyncio.get_running_loop().time() + ARRIVAL_SECONDS
        size = held = marks = 0
        arrived = False

        async def take() -> Message:
            nonlocal size, held, marks, arrived
            if arrived:
                # After the body, the next message is the caller's disconnect.
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                said = f"the body did not arrive within {ARRIVAL_SECONDS:g} seconds"
                raise HTTPException(408, said, {"Connection": "close"}) from None
            body = message.get("body", b"")
            arrived = not message.get("more_body", False)
            size += len(body)
            if size > self._max_body_bytes or (length.isdecimal() and int(length) > self._max_body_bytes):
                raise HTTPException(413, f"the body is longer than the {self._max_body_bytes} bytes that are allowed")
            more = max(size - FREE_BYTES, 0) - held
            if more > self._free:
                raise HTTPException(503, "the server holds as many bytes of requests as it may", {"Retry-After": "1"})
            held += more
            self._free -= more
            marks += sum(map(body.count, MARKS))
            if marks > MAX_MARKS:
                raise HTTPException(413, f"the body has more than {MAX_MARKS} commas, colons and opening brackets")
            return message

        try:
            yield take
        finally:
            self._free += held
