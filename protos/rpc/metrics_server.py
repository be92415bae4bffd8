"""The HTTP server beside each process: /metrics for Prometheus, /health and /live for supervisors."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

from prometheus_client import REGISTRY, CollectorRegistry, make_asgi_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from protos.rpc import addresses
from protos.rpc.http_server import HttpServer
from protos.rpc.security import PLAIN, Security

HEALTH, LIVE = "/health", "/live"
# A process counts as hanging if its own loop takes longer than this to answer.
ANSWER_SECONDS = 3.0


def start(
    address: str,
    is_serving: Callable[[], bool],
    security: Security = PLAIN,
    registry: CollectorRegistry = REGISTRY,
) -> Callable[[], None]:
    """Serves on host:port from a separate thread; returns a function that stops the server. Raises AddressError.

    Call it on the loop of the process, where `is_serving` is asked, so that a hanging loop is detected. With TLS, a
    renewed certificate is only shown after a restart; if callers need a certificate, /health and /live need none.
    Without TLS, on loopback, requests are refused if their Host header is neither localhost nor an IP address.
    """
    server = HttpServer(
        _application(is_serving, asyncio.get_running_loop(), registry),
        address,
        name="metrics",
        security=security,
        own_names=addresses.is_loopback(address) and not security.serves_tls,
        open_paths=frozenset({HEALTH, LIVE}),
    )
    # Not the loop of the process, whose next call would wait until all metrics are collected.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="metrics", daemon=True)
    thread.start()

    def run(work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def stop() -> None:
        run(server.stop(hurried=True))
        end()

    try:
        run(server.start())
    except BaseException:
        end()
        raise
    return stop


def _application(
    is_serving: Callable[[], bool], process: asyncio.AbstractEventLoop, registry: CollectorRegistry
) -> Starlette:
    """Makes the application. process: the loop of the process, which differs from the loop that serves this."""

    async def ask() -> bool:
        """Asks whether the process serves. Raises TimeoutError if the process hangs."""
        asked: Future[bool] = Future()

        def answer() -> None:
            # False if nobody waits any more.
            if asked.set_running_or_notify_cancel():
                asked.set_result(is_serving())

        process.call_soon_threadsafe(answer)
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asyncio.wrap_future(asked)

    def probe(*, ready: bool) -> Callable[[Request], Coroutine[None, None, Response]]:
        async def answer(_: Request) -> Response:
            try:
                serves = await ask()
            except (TimeoutError, asyncio.CancelledError):
                # Cancelled by a stopping server, as nobody else can cancel it.
                return PlainTextResponse("the process does not answer\n", 503)
            if ready and not serves:
                return PlainTextResponse("the process does not serve\n", 503)
            return PlainTextResponse("ok\n")

        return answer

    return Starlette(
        routes=[
            Route(HEALTH, probe(ready=True)),
            Route(LIVE, probe(ready=False)),
            Mount("/", make_asgi_app(registry)),
        ]
    )
