"""Metrics that every process has, and the HTTP endpoint that Prometheus reads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine

from prometheus_client import Counter, Gauge, Histogram, make_asgi_app

from protos.rpc import addresses
from protos.rpc.security import PLAIN, Security

HANDLED = Counter("kvkeep_rpc_handled", "Calls that ended, by status code.", ["method", "code"])
SECONDS = Histogram(
    "kvkeep_rpc_seconds",
    "Time from the first byte of a call to its status.",
    ["method"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30, 120),
)
IN_FLIGHT = Gauge("kvkeep_rpc_in_flight", "Calls being served.", ["method"])
REFUSED_CONNECTIONS = Counter(
    "kvkeep_http_refused_connections",
    "HTTP connections that were closed without a request being served, by server and reason.",
    ["server", "reason"],
)


def start_http(address: str, security: Security = PLAIN) -> Callable[[], None]:
    """Serves /metrics on host:port from a thread of its own; returns a function that stops it. Raises AddressError.

    With TLS a renewed certificate is shown after a restart only, and clients need one where callers do. Without, on
    loopback, no other name is answered to.
    """
    # Takes a fifth of a second, which a process without metrics need not wait.
    from protos.rpc.http_server import HttpServer

    own_names = addresses.is_loopback(address) and not security.serves_tls
    server = HttpServer(make_asgi_app(), address, name="metrics", security=security, own_names=own_names)
    # Not that of the process: its next call would wait until all metrics are collected.
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
