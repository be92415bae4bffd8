"""A receiver of OTLP traces over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

from tests.support.patience import patience

WAIT_SECONDS = patience(60)


class OtlpReceiver(rpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps every span, as (name of the service, span). Use it in a with statement."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, Any]] = []
        self._came = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        rpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        """The method that an exporter calls."""
        with self._came:
            for resource in request.resource_spans:
                [name] = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                self._spans += [(name, span) for scope in resource.scope_spans for span in scope.spans]
            self._came.notify_all()
        return pb.ExportTraceServiceResponse()

    def spans(self, trace_id: str = "") -> list[tuple[str, Any]]:
        """The received spans, of one trace or of all traces."""
        with self._came:
            return [(name, span) for name, span in self._spans if trace_id in ("", span.trace_id.hex())]

    def wait_for(self, enough: Callable[[list[tuple[str, Any]]], bool], trace_id: str = "") -> list[tuple[str, Any]]:
        """The received spans, after there are enough of them."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not enough(found := self.spans(trace_id)):
            with self._came:
                if not self._came.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"only {[(name, span.name) for name, span in found]} came")
        return found


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as Python values; a list as a tuple."""
    return {attribute.key: _value(attribute.value) for attribute in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(one) for one in value.array_value.values)
    return getattr(value, kind)
