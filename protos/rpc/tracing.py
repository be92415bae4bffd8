"""Traces: receives and passes on the W3C context of a request; sends one span per service and request over OTLP.

Off unless the environment names an OTLP endpoint; only then are the opentelemetry packages imported. A call carries
the context in its metadata; a message about many requests has a field with each request's context. The settings that
opentelemetry reads from OTEL_ variables (sampler, headers, certificates, queue sizes) apply here, too.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog

from protos.rpc.spans import Context, Span

if TYPE_CHECKING:
    from protos.rpc.otlp import OtlpTracer

TRACEPARENT = "traceparent"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

log = structlog.get_logger()

OFF = Span()

_tracer: "OtlpTracer | None" = None
_current: ContextVar[str] = ContextVar("traceparent", default="")


def start(process: str, environ: Mapping[str, str]) -> None:
    """Turns tracing on if the environment says so. If that fails, one line in the log says why."""
    global _tracer
    if not any(environ.get(name) for name in _ENDPOINTS) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    protocol = next(filter(None, map(environ.get, _PROTOCOLS)), "grpc")
    if protocol != "grpc":
        log.warning("no traces: only OTLP over gRPC is supported", protocol=protocol, hint=f"set {_PROTOCOLS[0]}=grpc")
        return
    try:
        from protos.rpc.otlp import OtlpTracer
    except ImportError as error:
        log.warning("no traces: a package is not installed", package=error.name, hint="pip install 'kvkeep[tracing]'")
        return
    _tracer = OtlpTracer(environ.get("OTEL_SERVICE_NAME") or f"kvkeep-{process}")
    log.info("traces are sent")


def stop() -> None:
    """Sends the remaining spans and turns tracing off; blocks for a limited time."""
    global _tracer
    if _tracer is not None:
        _tracer.stop()
        _tracer = None


def is_on() -> bool:
    """Whether spans are made."""
    return _tracer is not None


def receive(traceparent: str) -> None:
    """Takes the context that the current request's caller has sent; ignores a malformed context."""
    if (context := _parse(traceparent)) is not None:
        _adopt(traceparent, context)


def current() -> str:
    """The context of the current request, to pass on; empty for none."""
    return _current.get()


def begin(name: str) -> Span:
    """Begins the current request's span, below the caller's span, if any. From now on, `current` is this span."""
    if _tracer is None:
        return OFF
    span = _tracer.begin(name, _parse(_current.get()))
    _adopt(span.traceparent, Context(span.traceparent))
    return span


def join(name: str, traceparent: str) -> Span:
    """Begins the span of one of many requests that are served together; no span if the request is not traced."""
    if _tracer is None or (context := _parse(traceparent)) is None:
        return OFF
    return _tracer.begin(name, context)


def _parse(traceparent: str) -> Context | None:
    try:
        return Context(traceparent) if traceparent else None
    except ValueError:
        return None


def _adopt(traceparent: str, context: Context) -> None:
    # Each call runs in a separate task, so nothing needs to be reset afterwards.
    _current.set(traceparent)
    structlog.contextvars.bind_contextvars(trace_id=context.trace_id)
