"""A bound on the body of every HTTP request."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Entry:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        size = 0

        async def receive_bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes or (length.isdecimal() and int(length) > self._max_body_bytes):
                raise HTTPException(413, f"the body is longer than the {self._max_body_bytes} bytes that are taken")
            return message

        return await self._app(scope, receive_bounded, send)
