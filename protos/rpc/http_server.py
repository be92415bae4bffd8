"""An HTTP server: uvicorn on the loop of this process."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import structlog
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from protos.rpc import addresses
from protos.rpc.http_connection import CERTIFIED, REQUEST_SECONDS, SOCKET_OPTIONS, Connection, Connections
from protos.rpc.security import PLAIN, Security
from protos.rpc.startup import raise_file_limit

# The time limit for answers that are still being sent when a server stops.
STOP_SECONDS = 5

log = structlog.get_logger()


def peer_of(request: Request) -> str:
    """The origin of a request, as host:port; empty if unknown."""
    return "" if request.client is None else f"{request.client.host}:{request.client.port}"


def bind(address: str, count: int = 1, *, insecure: bool = False, setting: str = "") -> list[socket.socket]:
    """Binds sockets for servers on host:port; the system distributes connections among them. Raises AddressError.

    insecure: other machines may reach it. setting: the variable that chose the address.
    """
    addresses.prepare(address, insecure=insecure, setting=setting)
    # Bound alone first: with a shared port, a second process that listens there would not be noticed.
    first = _bound(address, setting)
    if count == 1:
        return [first]
    place = f"{address.rpartition(':')[0]}:{first.getsockname()[1]}"
    first.close()
    return [_bound(place, setting, shared=True) for _ in range(count)]


def _bound(address: str, setting: str, *, shared: bool = False) -> socket.socket:
    host, port = addresses.split_host_port(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # A port in TIME_WAIT counts as free.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    for option in SOCKET_OPTIONS:
        # Connections inherit these options from their listener.
        listener.setsockopt(*option)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise addresses.cannot_listen(address, setting, error) from error
    return listener


class _OwnNames:
    """Refuses requests whose Host header is neither localhost nor an IP address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not addresses.is_own_name(Headers(scope=scope).get("host", "")):
            app = PlainTextResponse(addresses.WRONG_HOST, 400)
        await app(scope, receive, send)


class _CertifiedCallers:
    """Refuses callers without a certificate, except on some paths."""

    def __init__(self, app: ASGIApp, open_paths: frozenset[str]) -> None:
        self._app = app
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not scope[CERTIFIED]:
            app = PlainTextResponse("this path needs a certificate of the caller\n", 403)
        await app(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Does as uvicorn's, but with a time limit on TLS handshakes, which no connection object covers."""
        config, loop = self.config, asyncio.get_running_loop()
        await self.lifespan.startup()

        def connect() -> asyncio.Protocol:
            return Connection(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        self.servers = [
            await loop.create_server(
                connect,
                sock=listener,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=None if config.ssl is None else REQUEST_SECONDS,
            )
            for listener in sockets or ()
        ]
        self.started = True
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The process handles signals itself.
        yield


class HttpServer:
    """Serves an application on host:port."""

    def __init__(
        self,
        app: ASGIApp,
        address: str,
        *,
        name: str = "http",
        security: Security = PLAIN,
        setting: str = "",
        own_names: bool = False,
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        """name: in the log and in metrics. setting: the variable that chose the address, for error messages.

        own_names: whether to answer only requests to localhost or an IP address. This stops DNS rebinding: if the name
        of another site resolves to this machine, a browser lets that site's pages read the answers.
        open_paths: paths that need no certificate if all other paths do. With TLS, a renewed certificate is only shown
        after a restart.
        """
        self.address = address
        self._name = name
        self._open_to_all = security.may_be_reached
        self._setting = setting
        if own_names:
            app = _OwnNames(app)
        certificates = ssl.CERT_NONE
        if security.tls_client_ca_file is not None:
            certificates = ssl.CERT_OPTIONAL if open_paths else ssl.CERT_REQUIRED
            if open_paths:
                app = _CertifiedCallers(app, open_paths)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
            ssl_certfile=security.tls_cert_file,
            ssl_keyfile=security.tls_key_file,
            ssl_ca_certs=None if security.tls_client_ca_file is None else str(security.tls_client_ca_file),
            ssl_cert_reqs=certificates,
        )
        self._server = _Uvicorn(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket | None = None) -> None:
        """Returns once it listens; `address` then has the real port in place of 0. Raises AddressError.

        listener: a socket of `bind` to use instead of a new socket.
        """
        if listener is None:
            [listener] = bind(self.address, insecure=self._open_to_all, setting=self._setting)
        self.address = f"{self.address.rpartition(':')[0]}:{listener.getsockname()[1]}"
        self._server.server_state = Connections(self._name, raise_file_limit())
        self._serving = asyncio.create_task(self._server.serve([listener]))
        await self._server.listening.wait()
        log.info("listening", server=self._name, address=self.address)

    async def stop(self, *, hurried: bool = False) -> None:
        """Closes the server. hurried: drops answers that are being sent."""
        if self._serving is None:
            return
        if hurried:
            self._server.config.timeout_graceful_shutdown = 0
        self._server.should_exit = True
        await self._serving
