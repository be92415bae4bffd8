"""Sends spans to an OTLP receiver by opentelemetry. Imported only if tracing is on, since the packages are an extra."""

import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context as Surroundings
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from protos.rpc.spans import Attribute, Context, Span

# How long an ending process waits for a receiver that does not answer.
STOP_SECONDS = 2.0


class OtlpSpan(Span):
    """A span that ends in a queue, which a thread of opentelemetry empties; a full queue drops spans."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, attributes: Mapping[str, Attribute], *, error: str = "") -> None:
        """Ends and queues the span."""
        self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class OtlpTracer:
    """Makes spans of one process. opentelemetry reads the receiver's address from the environment."""

    def __init__(self, service_name: str) -> None:
        self._exporter = OTLPSpanExporter()
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("kvkeep")

    def begin(self, name: str, parent: Context | None) -> Span:
        """Begins a span, in a new trace or below a parent."""
        surroundings = Surroundings()
        if parent is not None:
            flags = trace.TraceFlags(parent.flags)
            remote = trace.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags)
            surroundings = trace.set_span_in_context(trace.NonRecordingSpan(remote), surroundings)
        return OtlpSpan(self._tracer.start_span(name, context=surroundings, kind=trace.SpanKind.SERVER))

    def stop(self) -> None:
        """Sends the remaining spans, if the receiver accepts them in time."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_SECONDS)
        if ending.is_alive():
            # Aborts the call that the other thread waits for.
            self._exporter.shutdown()
            ending.join()
