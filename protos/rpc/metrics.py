"""Metrics that every process has, and the HTTP endpoint that Prometheus reads."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from protos.rpc import addresses
from protos.rpc.security import PLAIN, Security

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

HANDLED = Counter("kvkeep_rpc_handled", "Calls that ended, by status code.", ["method", "code"])
SECONDS = Histogram(
    "kvkeep_rpc_seconds",
    "Time from the first byte of a call to its status.",
    ["method"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30, 120),
)
IN_FLIGHT = Gauge("kvkeep_rpc_in_flight", "Calls being served.", ["method"])


def start_http(address: str, security: Security = PLAIN) -> Callable[[], None]:
    """Serves /metrics on host:port from a thread of its own; returns what stops it. Raises AddressError.

    With TLS a renewed certificate is shown after a restart only, and clients need one where callers do. Without, on
    loopback, no other name is answered to.
    """
    addresses.prepare(address, insecure=security.insecure or security.serves_tls)
    host, port = addresses.split_host_port(address)
    try:
        server, thread = start_http_server(
            port,
            host,
            certfile=_text(security.tls_cert_file),
            keyfile=_text(security.tls_key_file),
            client_cafile=_text(security.tls_client_ca_file),
            client_auth_required=security.tls_client_ca_file is not None,
        )
    except OSError as error:
        raise addresses.AddressError(f"cannot serve metrics on {address}: {error.strerror}") from error
    if addresses.is_loopback(address) and not security.serves_tls:
        server.set_app(_own_names(server.get_app()))

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _own_names(app: "WSGIApplication | None") -> "WSGIApplication":
    """Answers nobody who asks for another host than this one."""
    assert app is not None

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if addresses.is_own_name(environ.get("HTTP_HOST", "")):
            return app(environ, start_response)
        start_response("400 Bad Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [addresses.WRONG_HOST.encode()]

    return answer


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
