"""Validates a message and turns it into a Request. Every rule for callers' values is here, for gRPC and HTTP."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from google.protobuf.duration_pb2 import Duration

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2
from protos.kvcommon.eviction import Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc import tracing
from protos.rpc.errors import InvalidField
from scheduler.errors import ContextLengthError, ModelNotFoundError
from scheduler.frontend.chat_template import ChatTemplateError, UnreadFieldError
from scheduler.frontend.model_info import ModelInfo, TooLongError, pack
from scheduler.request import CacheOptions, Request

MAX_REQUEST_ID_BYTES = 128
MAX_NAME_BYTES = 256
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_IDS = 256
MAX_LOGPROBS = 20
# Beyond these, logits leave the range of float32.
SAMPLING_BOUNDS = {
    "temperature": (0, 100),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
MAX_RANGES = 64
MAX_BREAKPOINTS = 4
MAX_PRIORITY = 100
MAX_SAMPLES = 64
MAX_MESSAGES = 4096
MAX_HINTS_BYTES = 65_536
# The longest google.protobuf.Duration, in seconds.
MAX_SECONDS = 315_576_000_000
# The field that holds the prompt, by the kind of input.
_FIELDS = {"text": "text", "chat": "chat.messages", "token_ids": "token_ids.token_ids"}


class Breakpoint(NamedTuple):
    """A position in a conversation, and how long the prompt up to it stays cached; no duration is without end."""

    message: int
    characters: int
    priority: int
    duration: Duration | None


class RequestValidator:
    """Raises InvalidField and ModelNotFoundError; a returned request can run."""

    def __init__(self, model: ModelInfo, *, max_prompt_bytes: int, onload_timeout: float) -> None:
        """onload_timeout: default of requests, in seconds."""
        self.model = model
        self._max_prompt_bytes = max_prompt_bytes
        self._onload_timeout = onload_timeout
        self._arrivals = itertools.count(1)

    async def validate(self, message: pb.StreamGenerateRequest) -> list[Request]:
        """Validates cheap things first; text is tokenized in a thread. Returns a request per sample."""
        arrived_at = time.monotonic()
        _check_size(message)
        if len(message.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidField("request_id", f"has more than {MAX_REQUEST_ID_BYTES} bytes")
        self.check_model(message.model)
        sampling = _sampling(message.sampling, self._stop_token_ids(message))
        stop = _stop(message.stop)
        policy = parse(message.eviction_policy, self.model.layout) if message.HasField("eviction_policy") else None
        options = _cache_options(message)
        breakpoints = _breakpoints(message)
        timeout = self._timeout(message.cache)
        if message.HasField("max_tokens") and message.max_tokens < 1:
            raise InvalidField("max_tokens", "must be at least 1")
        samples = message.n if message.HasField("n") else 1
        if not 1 <= samples <= MAX_SAMPLES:
            raise InvalidField("n", f"must be from 1 to {MAX_SAMPLES}")
        prompt_ids, ends = await self._prompt_ids(message, breakpoints)
        first = Request(
            request_id=message.request_id or secrets.token_hex(8),
            prompt_ids=prompt_ids,
            max_tokens=self._max_tokens(message, len(prompt_ids), policy),
            sampling=sampling,
            arrival=next(self._arrivals),
            arrived_at=arrived_at,
            onload_timeout=timeout,
            stop=stop,
            priority=message.priority,
            cache=_keeping(options, _breakpoint_ranges(breakpoints, ends)),
            traceparent=tracing.current(),
        )
        return [first, *(self._sample(first, index) for index in range(1, samples))]

    def output_of(self, request: Request, token_ids: Sequence[int]) -> array[int]:
        """Output that a request has from elsewhere, behind which it continues."""
        if len(token_ids) >= request.max_tokens:
            raise InvalidField("output_token_ids", f"must be fewer than max_tokens, which is {request.max_tokens}")
        self._check_ids("output_token_ids", token_ids)
        return array("I", token_ids)

    def _sample(self, first: Request, index: int) -> Request:
        sampling = execution_pb2.SamplingParams()
        sampling.CopyFrom(first.sampling)
        sampling.seed = sample_seed(first.sampling.seed, index)
        return replace(first, sample_index=index, arrival=next(self._arrivals), sampling=sampling)

    def _timeout(self, cache: pb.CacheOptions) -> float:
        if not cache.HasField("onload_timeout"):
            return self._onload_timeout
        return _duration("cache.onload_timeout", cache.onload_timeout).ToNanoseconds() / 1e9

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError unless this model is served; an empty name is any model."""
        if name not in ("", self.model.name):
            raise ModelNotFoundError(
                f"this scheduler serves {self.model.name!r} only",
                fields={"model": f"is not served; {self.model.name!r} is"},
            )

    async def encode(self, message: pb.StreamGenerateRequest) -> array[int]:
        """Ids of the prompt, however many; only its model and its text are validated."""
        _check_size(message)
        self.check_model(message.model)
        ids, _ = await self._encode(message, ())
        return ids

    async def decode(self, model: str, token_ids: Sequence[int]) -> str:
        self.check_model(model)
        self._check_ids("token_ids", token_ids)
        return await self.model.decode(token_ids)

    async def _encode(
        self, message: pb.StreamGenerateRequest, breakpoints: Sequence[Breakpoint], most: int | None = None
    ) -> tuple[array[int], Sequence[int]]:
        """The prompt's ids, and the number in front of each breakpoint. Raises TooLongError for more than `most`."""
        match message.WhichOneof("input"):
            case "text":
                self._check_bytes("text", len(message.text.encode()))
                return await self.model.encode_text(message.text, most), ()
            case "chat":
                return await self._chat_ids(message.chat, breakpoints, most)
            case "token_ids":
                return pack(message.token_ids.token_ids, most), ()
            case _:
                raise InvalidField("input", "is missing: give text, chat or token_ids")

    async def _prompt_ids(
        self, message: pb.StreamGenerateRequest, breakpoints: Sequence[Breakpoint]
    ) -> tuple[array[int], Sequence[int]]:
        field, fits = _FIELDS.get(message.WhichOneof("input"), ""), self.model.max_tokens - 1
        try:
            ids, ends = await self._encode(message, breakpoints, fits)
        except TooLongError as error:
            raise ContextLengthError(field, f"{error}; at most {fits} fit") from error
        if not ids:
            raise InvalidField(field, "must not be empty")
        if message.WhichOneof("input") == "token_ids" or not self.model.own_ids_fit:
            self._check_ids(field, ids)
        return ids, ends

    async def _chat_ids(
        self, chat: pb.ChatInput, breakpoints: Sequence[Breakpoint], most: int | None
    ) -> tuple[array[int], Sequence[int]]:
        if not chat.messages:
            raise InvalidField("chat.messages", "must not be empty")
        for index, message in enumerate(chat.messages):
            if not message.role:
                raise InvalidField(f"chat.messages[{index}].role", "must not be empty")
        if not self.model.has_chat_template:
            raise InvalidField("chat", "cannot be used: the model has no chat template")
        messages = [_said(message) for message in chat.messages]
        size = sum(len(text.encode()) for message in messages for text in message.values())
        self._check_bytes("chat.messages", size)
        try:
            return await self.model.encode_chat(messages, [breakpoint_[:2] for breakpoint_ in breakpoints], most)
        except ChatTemplateError as error:
            raise InvalidField("chat.messages", f"do not fit the model's chat template: {error}") from error
        except UnreadFieldError as error:
            field = f"chat.messages[{error.message}].{error.field}"
            raise InvalidField(field, "is not read by the model's chat template") from error

    def _check_bytes(self, field: str, size: int) -> None:
        if size == 0:
            raise InvalidField(field, "must not be empty")
        if size > self._max_prompt_bytes:
            raise InvalidField(field, f"has {size} bytes; at most {self._max_prompt_bytes} are taken")

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        size = self.model.vocab_size
        # Fast: a prompt may have very many ids, and the event loop waits.
        if max(ids, default=0) >= size:
            index = next(index for index, token_id in enumerate(ids) if token_id >= size)
            raise InvalidField(f"{field}[{index}]", f"must be below {size}, the vocabulary's size")

    def _stop_token_ids(self, message: pb.StreamGenerateRequest) -> list[int]:
        if len(message.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidField("stop_token_ids", f"has more than {MAX_STOP_IDS} entries")
        self._check_ids("stop_token_ids", message.stop_token_ids)
        own = () if message.ignore_eos else self.model.eos_token_ids
        return sorted({*message.stop_token_ids, *own})

    def _max_tokens(self, message: pb.StreamGenerateRequest, prompt_tokens: int, policy: Policy | None) -> int:
        fits = self.model.longest(policy) - prompt_tokens
        if not message.HasField("max_tokens"):
            return fits
        if message.max_tokens > fits:
            said = f"is more than fits behind {prompt_tokens} prompt tokens, which is {fits}"
            raise ContextLengthError("max_tokens", said)
        return message.max_tokens


def _check_size(message: pb.StreamGenerateRequest) -> None:
    """Refuses messages that would take long to validate."""
    if len(message.chat.messages) > MAX_MESSAGES:
        raise InvalidField("chat.messages", f"has more than {MAX_MESSAGES} entries")
    if message.cache.kv_hints.ByteSize() > MAX_HINTS_BYTES:
        raise InvalidField("cache.kv_hints", f"has more than {MAX_HINTS_BYTES} bytes")


def _said(message: pb.ChatMessage) -> dict[str, str]:
    """A message as templates read it, without empty optional fields."""
    said = {"role": message.role, "content": message.content}
    more = {"name": message.name, "reasoning": message.reasoning}
    return said | {field: text for field, text in more.items() if text}


def sample_seed(seed: int, index: int) -> int:
    """The seed of a sample other than the first."""
    # A hash: callers choose neighbouring seeds for requests that shall differ.
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big")


def _sampling(sampling: pb.SamplingParams, stop_token_ids: list[int]) -> execution_pb2.SamplingParams:
    """Resolves defaults. NaN fails every comparison."""
    resolved = execution_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        stop_token_ids=stop_token_ids,
    )
    for name, (low, high) in SAMPLING_BOUNDS.items():
        if not low <= getattr(resolved, name) <= high:
            raise InvalidField(f"sampling.{name}", f"must be between {low} and {high}")
    if not 0 < resolved.top_p <= 1:
        raise InvalidField("sampling.top_p", "must be greater than 0 and at most 1")
    if not 0 <= resolved.min_p < 1:
        raise InvalidField("sampling.min_p", "must be at least 0 and less than 1")
    if sampling.HasField("num_logprobs"):
        if sampling.num_logprobs > MAX_LOGPROBS:
            raise InvalidField("sampling.num_logprobs", f"must be at most {MAX_LOGPROBS}")
        resolved.num_logprobs = sampling.num_logprobs
    return resolved


def _stop(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOPS:
        raise InvalidField("stop", f"has more than {MAX_STOPS} entries")
    for index, text in enumerate(stop):
        if not text:
            raise InvalidField(f"stop[{index}]", "must not be empty")
        if len(text.encode()) > MAX_STOP_BYTES:
            raise InvalidField(f"stop[{index}]", f"has more than {MAX_STOP_BYTES} bytes")
    return tuple(stop)


def _cache_options(message: pb.StreamGenerateRequest) -> CacheOptions:
    cache = message.cache
    return CacheOptions(
        salt=_name(cache, "salt"),
        session_id=_name(cache, "session_id"),
        tenant_id=_name(cache, "tenant_id"),
        retention=_retention(cache),
        hints=cache.kv_hints if cache.HasField("kv_hints") else None,
        no_read=cache.no_read,
        no_store=cache.no_store,
        eviction_policy=message.eviction_policy if message.HasField("eviction_policy") else None,
    )


def _breakpoints(message: pb.StreamGenerateRequest) -> list[Breakpoint]:
    """The conversation's cache breakpoints in order."""
    breakpoints = []
    for index, said in enumerate(message.chat.messages):
        for number, breakpoint_ in enumerate(said.cache_breakpoints):
            field = f"chat.messages[{index}].cache_breakpoints[{number}]"
            if breakpoint_.content_end > len(said.content):
                raise InvalidField(f"{field}.content_end", "is behind the end of the message's content")
            if breakpoint_.retention_priority > MAX_PRIORITY:
                raise InvalidField(f"{field}.retention_priority", f"must be at most {MAX_PRIORITY}")
            lasts = None
            if breakpoint_.HasField("retention_duration"):
                lasts = _duration(f"{field}.retention_duration", breakpoint_.retention_duration)
            breakpoints.append(Breakpoint(index, breakpoint_.content_end, breakpoint_.retention_priority, lasts))
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise InvalidField("chat.messages", f"have more than {MAX_BREAKPOINTS} cache breakpoints")
    if breakpoints and message.cache.retention_ranges:
        raise InvalidField("cache.retention_ranges", "cannot be given together with cache breakpoints in messages")
    return sorted(breakpoints, key=lambda breakpoint_: breakpoint_[:2])


def _breakpoint_ranges(breakpoints: Sequence[Breakpoint], ends: Sequence[int]) -> list[common.RetentionRange]:
    """Retention requests for the prompt's tokens. ends: tokens in front of each breakpoint.

    The prompt up to a breakpoint is also in front of every later one: a range is kept as long as the longest of these.
    """
    ranges, start = [], 0
    for index, end in enumerate(ends):
        if end <= start:
            continue
        later = breakpoints[index:]
        durations = [breakpoint_.duration for breakpoint_ in later if breakpoint_.duration is not None]
        kept = common.RetentionRange(start=start, end=end, retention_priority=max(p.priority for p in later))
        if len(durations) == len(later):
            kept.retention_duration.CopyFrom(max(durations, key=Duration.ToNanoseconds))
        ranges.append(kept)
        start = end
    return ranges


def _keeping(options: CacheOptions, ranges: Sequence[common.RetentionRange]) -> CacheOptions:
    """The options with more retention requests."""
    if not ranges:
        return options
    retention = kvcache_pb2.RetentionConfig(ranges=ranges)
    if options.retention is not None:
        retention.MergeFrom(options.retention)
    return replace(options, retention=retention)


def _name(cache: pb.CacheOptions, field: Literal["salt", "session_id", "tenant_id"]) -> str | None:
    if not cache.HasField(field):
        return None
    value: str = getattr(cache, field)
    if not value:
        raise InvalidField(f"cache.{field}", "must not be empty when given")
    if len(value.encode()) > MAX_NAME_BYTES:
        raise InvalidField(f"cache.{field}", f"has more than {MAX_NAME_BYTES} bytes")
    return value


def _duration(field: str, duration: Duration) -> Duration:
    if not 0 < duration.seconds + duration.nanos / 1e9 <= MAX_SECONDS:
        raise InvalidField(field, "must be greater than zero, and at most 10,000 years")
    return duration


def _retention(cache: pb.CacheOptions) -> kvcache_pb2.RetentionConfig | None:
    config = kvcache_pb2.RetentionConfig()
    if cache.HasField("decode_retention_priority"):
        if cache.decode_retention_priority > MAX_PRIORITY:
            raise InvalidField("cache.decode_retention_priority", f"must be at most {MAX_PRIORITY}")
        config.decode_retention_priority = cache.decode_retention_priority
    if cache.HasField("decode_retention_duration"):
        field = "cache.decode_retention_duration"
        config.decode_retention_duration.CopyFrom(_duration(field, cache.decode_retention_duration))
        if not config.HasField("decode_retention_priority"):
            raise InvalidField(field, "needs cache.decode_retention_priority")
    if len(cache.retention_ranges) > MAX_RANGES:
        raise InvalidField("cache.retention_ranges", f"has more than {MAX_RANGES} entries")
    previous_end: int | None = 0
    for index, requested in sorted(enumerate(cache.retention_ranges), key=lambda entry: entry[1].start):
        field = f"cache.retention_ranges[{index}]"
        if requested.retention_priority > MAX_PRIORITY:
            raise InvalidField(f"{field}.retention_priority", f"must be at most {MAX_PRIORITY}")
        if requested.HasField("end") and requested.end <= requested.start:
            raise InvalidField(f"{field}.end", "must be greater than start")
        if previous_end is None or requested.start < previous_end:
            raise InvalidField(f"{field}.start", "lies in another range")
        previous_end = requested.end if requested.HasField("end") else None
        if requested.HasField("retention_duration"):
            _duration(f"{field}.retention_duration", requested.retention_duration)
        config.ranges.append(requested)
    return config if config.ranges or config.HasField("decode_retention_priority") else None
