"""What every HTTP request passes first: a name for the logs, and a bound on its body."""

import secrets

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.rpc import tracing
from protos.rpc.interceptors import REQUEST_ID_KEY

_MAX_REQUEST_ID = 128


class Entry:
    """ASGI middleware. The caller's X-Request-Id, or one that is drawn, is in the answer and in the log."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        name = headers.get(REQUEST_ID_KEY, "")
        name = name[:_MAX_REQUEST_ID] if name.isascii() and name.isprintable() and name else secrets.token_hex(8)
        # Each request runs in a task of its own, so that nothing needs to be unbound afterwards.
        structlog.contextvars.bind_contextvars(request_id=name, method=f"{scope['method']} {scope['path']}"[:128])
        tracing.receive(headers.get(tracing.TRACEPARENT, ""))
        length = headers.get("content-length", "")
        size = 0

        async def receive_bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes or (length.isdecimal() and int(length) > self._max_body_bytes):
                raise HTTPException(413, f"the body is longer than the {self._max_body_bytes} bytes that are taken")
            return message

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID_KEY.encode(), name.encode())]
            await send(message)

        return await self._app(scope, receive_bounded, send_named)
