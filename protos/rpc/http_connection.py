"""One HTTP connection, with limits on the size and the time of a request's head."""

import asyncio
import socket
from collections import Counter
from typing import Any, cast
from urllib.parse import urlsplit

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from protos.rpc.logs import Summaries
from protos.rpc.metrics import REFUSED_CONNECTIONS

# The limit from the start of a connection, or the end of the last answer, to the end of a request's headers.
REQUEST_SECONDS = 10.0
# Limits for one request: bytes of its URL and all names and values, including trailers; and the number of names.
MAX_HEADER_BYTES = 1 << 16
MAX_HEADERS = 256
# The limit on requests of one connection that wait while an earlier request is answered.
MAX_QUEUED = 16
# The limit on connections of one server. The limit is also at most 1 / SHARE_OF_FILES of the files that the process may
# open.
MAX_CONNECTIONS = 16_384
SHARE_OF_FILES = 4
# The key in the scope that says whether the caller has shown a certificate.
CERTIFIED = "kvkeep.certified"
# A peer that has vanished, or does not read its answer, is given up after about two minutes.
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)

log = structlog.get_logger()


class _RefusedError(Exception):
    """Raised in a callback to leave the parser."""


class Connections(ServerState):
    """The connections of one server."""

    def __init__(self, server: str, open_files: int) -> None:
        """server: its name in the log and in metrics. open_files: how many files the process may open."""
        super().__init__()
        self.most = min(MAX_CONNECTIONS, max(1, open_files // SHARE_OF_FILES))
        # Connections without a complete request, longest waiting first.
        self.waiting: dict[Connection, None] = {}
        self._server = server
        self._refused: Counter[str] = Counter()
        self._summaries = Summaries()

    def make_room(self) -> None:
        """Closes the connection that has waited longest for a complete request, if there are too many connections."""
        if len(self.connections) > self.most:
            next(iter(self.waiting)).refuse("too_many_connections")

    def count(self, reason: str) -> None:
        """Notes that a connection was closed, and why."""
        REFUSED_CONNECTIONS.labels(self._server, reason).inc()
        self._refused[reason] += 1
        if self._summaries.is_due():
            log.warning("connections refused", server=self._server, **self._refused)
            self._refused.clear()


class Connection(HttpToolsProtocol):
    """Closes on requests that are too slow, too large, or ambiguous."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = cast(Connections, self.server_state)
        self._deadline: asyncio.TimerHandle | None = None
        # Bytes since the parser last completed a request's headers, a piece of its body, or the request: a bound on
        # unfinished headers, trailers and extensions of chunks.
        self._unparsed = 0
        self._header_bytes = 0
        self._refusal: tuple[int, str, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time limit for the first request."""
        super().connection_made(transport)
        self._await_request()
        self._all.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.refuse("headers_too_large", 431, "the headers of a request are too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[CERTIFIED] = bool(self.transport.get_extra_info("peercert"))

    def on_url(self, url: bytes) -> None:
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if said := self._ambiguity():
            raise self._refused("ambiguous_host", 400, said)
        if len(self.pipeline) >= MAX_QUEUED:
            said = f"a connection may have {MAX_QUEUED} requests waiting for their turn"
            raise self._refused("too_many_requests", 429, said)
        # The connection waits for the body, and may be closed to make room. The application limits the time of a body.
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        if self._deadline is None:
            self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Waits for the next request, unless the request is already there."""
        is_last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if is_last:
            self._await_request()
        elif not self.pipeline and self.cycle.more_body:
            # The request being served now waits for its body.
            self._all.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Refuses a request that the parser rejects."""
        reason, status, said = "", 400, msg
        if self._refusal is not None:
            status, reason, said = self._refusal
        self.refuse(reason or "malformed_request", status, said)

    def refuse(self, reason: str, status: int = 0, said: str = "") -> None:
        """Closes the connection. With a status, the caller gets the reason, unless an answer is already being sent."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        self._all.count(reason)
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if status and not is_answering:
            head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % (len(said) + 1) + said.encode() + b"\n")
        self.transport.close()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._all.waiting[self] = None
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.refuse, "no_request")

    def _stop_waiting(self) -> None:
        self._all.waiting.pop(self, None)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _measure(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            said = f"a request may have {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes of URL and headers"
            raise self._refused("headers_too_large", 431, said)

    def _refused(self, reason: str, status: int, said: str) -> _RefusedError:
        self._refusal = (status, reason, said)
        return _RefusedError(said)

    def _ambiguity(self) -> str:
        """Why two readers could disagree on the request's host; empty for a clear request."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            return "a request must have one Host header"
        if self.url.startswith(b"/") or self.url == b"*":
            return ""
        authority = urlsplit(self.url).netloc
        return "" if hosts and authority.lower() == hosts[0].lower() else "the URL names another host than the header"
