"""What is told of every request when it has ended: metrics, its span, and a line in the access log.

Nothing of what was said in it, and a salt as a part of its hash only.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc import tracing
from protos.rpc.errors import ServiceError, UnexpectedError
from protos.rpc.logs import short_hash
from scheduler.engine import Engine
from scheduler.generation import Stream

_ABORTED = "CANCELLED"
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Watched:
    """A request from its arrival to its end. Whoever takes it sets `stream`."""

    def __init__(self, message: pb.StreamGenerateRequest, engine: Engine) -> None:
        self.stream: Stream | None = None
        self._message = message
        self._engine = engine
        self._operation = "chat" if message.WhichOneof("input") == "chat" else "text_completion"
        self._span = tracing.begin(f"{self._operation} {engine.model.name}")

    def end(self, error: str, access_log: Any) -> None:
        """Tells of it. error: why its answer broke off, empty when it did not."""
        if self.stream is None:
            self._engine.metrics.refused.labels(error).inc()
            event = "request refused"
            fields: dict[str, Any] = {"generation": self._message.request_id[:128]}
            attributes: dict[str, tracing.Attribute] = {}
        else:
            event = "request ended"
            fields = self._taken(self.stream, error)
            attributes = _usage(fields)
            # All that it was to have may have come before its caller left.
            error = error if fields["finish_reason"] in ("abort", "error") else ""
        if self._span is not tracing.OFF:
            self._span.end(self._asked() | attributes, error=error)
        if error:
            fields["error"] = error
        access_log.info(event, **fields)

    def _taken(self, stream: Stream, error: str) -> dict[str, Any]:
        generations, request = stream.generations, stream.generations[0].request
        reason = _finish_reason(stream, error)
        finished = reason in _REASONS.values()
        seconds = (max(one.last_token_at for one in generations) if finished else time.monotonic()) - request.arrived_at
        metrics = self._engine.metrics
        metrics.requests.labels(reason).inc()
        metrics.request.observe(seconds)
        fields: dict[str, Any] = {
            "generation": request.request_id,
            "tenant": request.wishes.tenant_id or "",
            "finish_reason": reason,
            "samples": len(generations),
            "prompt_tokens": len(request.prompt_ids),
            "cached_tokens": sum(one.cached_tokens for one in generations),
            "output_tokens": sum(one.output_tokens for one in generations),
            "preemptions": sum(one.preemptions for one in generations),
            "seconds": round(seconds, 4),
        }
        times = {"queue_seconds": generations[0].started_at, "first_token_seconds": generations[0].first_token_at}
        fields |= {name: round(at - request.arrived_at, 4) for name, at in times.items() if at is not None}
        if request.wishes.salt is not None:
            fields["salt_sha256"] = short_hash(request.wishes.salt)
        return fields

    def _asked(self) -> dict[str, tracing.Attribute]:
        message, sampling, model = self._message, self._message.sampling, self._engine.model.name
        attributes: dict[str, tracing.Attribute] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "kvkeep",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.temperature": sampling.temperature,
        }
        if message.HasField("max_tokens"):
            attributes["gen_ai.request.max_tokens"] = message.max_tokens
        if sampling.HasField("top_p"):
            attributes["gen_ai.request.top_p"] = sampling.top_p
        if message.HasField("n"):
            attributes["gen_ai.request.choice.count"] = message.n
        return attributes


def _usage(fields: dict[str, Any]) -> dict[str, tracing.Attribute]:
    """What the line in the log says, in the words of opentelemetry where it has any."""
    attributes: dict[str, tracing.Attribute] = {
        "gen_ai.response.id": fields["generation"],
        "gen_ai.response.finish_reasons": [fields["finish_reason"]],
        "gen_ai.usage.input_tokens": fields["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": fields["cached_tokens"],
        "gen_ai.usage.output_tokens": fields["output_tokens"],
        "kvkeep.preemptions": fields["preemptions"],
    }
    if "queue_seconds" in fields:
        attributes["kvkeep.queue_seconds"] = fields["queue_seconds"]
    if "first_token_seconds" in fields:
        attributes["gen_ai.response.time_to_first_chunk"] = fields["first_token_seconds"]
    return attributes


def _finish_reason(stream: Stream, error: str) -> str:
    """Of samples that ended differently, that of those which were cut off."""
    reasons = {generation.finish_reason for generation in stream.generations}
    if pb.FINISH_REASON_UNSPECIFIED in reasons:
        return "abort" if error == _ABORTED else "error"
    return _REASONS[max(reasons)]


@contextlib.contextmanager
def watched(message: pb.StreamGenerateRequest, engine: Engine, access_log: Any) -> Iterator[Watched]:
    """Tells of a request when the block is left, however it is. access_log: a logger of structlog's."""
    request, error = Watched(message, engine), ""
    try:
        yield request
    except ServiceError as failure:
        error = failure.reason
        raise
    except (asyncio.CancelledError, GeneratorExit):
        # The caller left, or its deadline passed.
        error = _ABORTED
        raise
    except Exception:
        error = UnexpectedError.reason
        raise
    finally:
        request.end(error, access_log)
