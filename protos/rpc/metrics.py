"""Metrics that every process has."""

from prometheus_client import Counter, Gauge, Histogram

HANDLED = Counter("kvkeep_rpc_handled", "Calls that ended, by status code.", ["method", "code"])
SECONDS = Histogram(
    "kvkeep_rpc_seconds",
    "Time from the start of a call's handler to its end.",
    ["method"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30, 120),
)
IN_FLIGHT = Gauge("kvkeep_rpc_in_flight", "Calls being served.", ["method"])
REFUSED_CONNECTIONS = Counter(
    "kvkeep_http_refused_connections",
    "HTTP connections that the server closed instead of serving a request, by server and reason.",
    ["server", "reason"],
)
CLOSED_CONNECTIONS = Counter(
    "kvkeep_rpc_closed_connections",
    "gRPC connections without a call that were closed to make room for others, by server.",
    ["server"],
)
