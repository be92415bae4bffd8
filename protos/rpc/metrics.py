"""Metrics that every process has, and the HTTP endpoint that Prometheus reads."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from protos.rpc import addresses

HANDLED = Counter("kvkeep_rpc_handled", "Calls that ended, by status code.", ["method", "code"])
SECONDS = Histogram(
    "kvkeep_rpc_seconds",
    "Time from the first byte of a call to its status.",
    ["method"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30, 120),
)
IN_FLIGHT = Gauge("kvkeep_rpc_in_flight", "Calls being served.", ["method"])


def start_http(address: str, *, insecure: bool = False) -> Callable[[], None]:
    """Serves /metrics on host:port from a thread of its own; returns what stops it. Raises AddressError."""
    addresses.prepare(address, insecure=insecure)
    host, port = addresses.split_host_port(address)
    try:
        server, thread = start_http_server(port, host)
    except OSError as error:
        raise addresses.AddressError(f"cannot serve metrics on {address}: {error.strerror}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
