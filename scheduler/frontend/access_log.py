"""The record of every ended request: metrics, its span, and a line in the access log.

The record contains no prompt and no output, and only a part of a salt's hash.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc import tracing
from protos.rpc.errors import ServiceError, UnexpectedError
from protos.rpc.identity import current
from protos.rpc.logs import short_hash
from protos.rpc.spans import Attribute
from scheduler.frontend.output import Stream
from scheduler.metrics import RequestMetrics

# The caller left, or its deadline passed.
ABORTED = "CANCELLED"
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


@dataclass
class LogLine:
    """The line of a call that is being served.

    generating: whether the call asks for output. is_quiet: whether no line is written.
    """

    fields: dict[str, Any]
    generating: bool
    is_quiet: bool = False
    started: float = field(default_factory=time.monotonic)


_line: ContextVar[LogLine | None] = ContextVar("line", default=None)


def note(**fields: Any) -> None:
    """Adds fields to the line of the call that is being served, if it has one."""
    if (line := _line.get()) is not None:
        line.fields |= fields


class AccessLog:
    """Writes a line for every call, however it ended, and counts ended and refused requests."""

    def __init__(self, metrics: RequestMetrics, log: Any = None) -> None:
        """log: a structlog logger; None for the process's own."""
        self._metrics = metrics
        self._log = log or structlog.get_logger()

    @contextlib.contextmanager
    def call(self, peer: str, *, generating: bool = False) -> Iterator[LogLine]:
        """Surrounds a call. Until its task ends, `note` refers to this call. peer: the caller's address."""
        line = LogLine({"peer": peer}, generating)
        _line.set(line)
        try:
            yield line
        except BaseException as error:
            line.fields.setdefault("error", _reason(error))
            raise
        finally:
            self._write(line)

    def _write(self, line: LogLine) -> None:
        fields = line.fields
        is_refused = "error" in fields and "finish_reason" not in fields
        if is_refused and line.generating:
            self._metrics.refused.labels(fields["error"]).inc()
        if line.is_quiet:
            return
        identity = current()
        name, tenant = ("", "") if identity is None else (identity.name, identity.tenant)
        seconds = round(time.monotonic() - line.started, 4)
        self._log.info(
            "request refused" if is_refused else "request ended",
            **{"caller": name, "tenant": tenant} | fields,
            seconds=seconds,
        )

    @contextlib.contextmanager
    def generation(self, message: pb.StreamGenerateRequest, model: str) -> Iterator["GenerationRecord"]:
        """Surrounds a request for output. model: the model's name."""
        record, error = GenerationRecord(message, model, self._metrics), ""
        try:
            yield record
        except BaseException as failure:
            error = _reason(failure)
            raise
        finally:
            record.end(error)


class GenerationRecord:
    """A request for output from its arrival to its end. `stream` is set once the request is accepted."""

    def __init__(self, message: pb.StreamGenerateRequest, model: str, metrics: RequestMetrics) -> None:
        self.stream: Stream | None = None
        self._message = message
        self._model = model
        self._metrics = metrics
        self._operation = "chat" if message.WhichOneof("input") == "chat" else "text_completion"
        self._span = tracing.begin(f"{self._operation} {model}")

    def end(self, error: str) -> None:
        """Ends the span and adds to the line. error: why the output broke off, empty if it did not."""
        fields: dict[str, Any] = {"generation": self._message.request_id[:128]}
        attributes: dict[str, Attribute] = {}
        if self.stream is not None and self.stream.was_taken:
            fields = self._accepted(self.stream, error)
            attributes = _usage(fields)
            # A caller may leave after its last token.
            error = error if fields["finish_reason"] in ("abort", "error") else ""
        if self._span is not tracing.OFF:
            self._span.end(self._asked() | attributes, error=error)
        if error:
            fields["error"] = error
        # HTTP requests run in separate tasks, and their lines are written outside of these tasks.
        if trace_id := structlog.contextvars.get_contextvars().get("trace_id"):
            fields["trace_id"] = trace_id
        note(**fields)

    def _accepted(self, stream: Stream, error: str) -> dict[str, Any]:
        generations, request = stream.generations, stream.generations[0].request
        reason = _finish_reason(stream, error)
        ended_at = max(generation.last_token_at for generation in generations)
        seconds = (time.monotonic() if reason in ("abort", "error") else ended_at) - request.arrived_at
        self._metrics.requests.labels(reason).inc()
        self._metrics.request.observe(seconds)
        fields: dict[str, Any] = {
            "generation": request.request_id,
            "tenant": request.cache.tenant_id or "",
            "finish_reason": reason,
            "samples": len(generations),
            "prompt_tokens": len(request.prompt_ids),
            "cached_tokens": sum(generation.counted.cached_tokens for generation in generations),
            "output_tokens": sum(generation.output_tokens for generation in generations),
            "preemptions": sum(generation.counted.preemptions for generation in generations),
        }
        times = {"queue_seconds": generations[0].started_at, "ttft_seconds": generations[0].first_token_at}
        fields |= {name: round(at - request.arrived_at, 4) for name, at in times.items() if at is not None}
        if request.cache.salt is not None:
            fields["salt_sha256"] = short_hash(request.cache.salt)
        return fields

    def _asked(self) -> dict[str, Attribute]:
        message, sampling = self._message, self._message.sampling
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "kvkeep",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.temperature": sampling.temperature,
        }
        if message.HasField("max_tokens"):
            attributes["gen_ai.request.max_tokens"] = message.max_tokens
        if sampling.HasField("top_p"):
            attributes["gen_ai.request.top_p"] = sampling.top_p
        if message.HasField("n"):
            attributes["gen_ai.request.choice.count"] = message.n
        return attributes


def _usage(fields: dict[str, Any]) -> dict[str, Attribute]:
    """Returns a line's fields under OpenTelemetry's names, or with the prefix "kvkeep." where there is no such name."""
    attributes: dict[str, Attribute] = {
        "gen_ai.response.id": fields["generation"],
        "gen_ai.response.finish_reasons": [fields["finish_reason"]],
        "gen_ai.usage.input_tokens": fields["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": fields["cached_tokens"],
        "gen_ai.usage.output_tokens": fields["output_tokens"],
        "kvkeep.preemptions": fields["preemptions"],
    }
    if "queue_seconds" in fields:
        attributes["kvkeep.queue_seconds"] = fields["queue_seconds"]
    if "ttft_seconds" in fields:
        attributes["gen_ai.response.time_to_first_chunk"] = fields["ttft_seconds"]
    return attributes


def _finish_reason(stream: Stream, error: str) -> str:
    """Returns the finish reason: error or abort if a sample did not finish, else the first of abort, length, stop."""
    reasons = {generation.finish_reason for generation in stream.generations}
    if pb.FINISH_REASON_UNSPECIFIED in reasons:
        return "abort" if error == ABORTED else "error"
    return _REASONS[max(reasons)]


def _reason(error: BaseException) -> str:
    if isinstance(error, ServiceError):
        return error.reason
    return ABORTED if isinstance(error, asyncio.CancelledError | GeneratorExit) else UnexpectedError.reason
