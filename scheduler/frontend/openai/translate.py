"""Turns OpenAI's requests into messages of the generation service, and names of fields back."""

import sys
from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField
from scheduler.frontend.openai.extensions import EvictionPolicy, KvHints, Retention, is_encodable
from scheduler.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Generation,
    Message,
    TokenizeRequest,
)

# OpenAI's default for completions; a conversation has no bound but the context.
COMPLETION_TOKENS = 16
# Retention priority of cache_control and prompt_cache_retention: above the default of 35, below operators' own.
CACHED_PRIORITY = 80
# Joins the parts of a message, as in vLLM.
PART_SEPARATOR = "\n"
# Nesting of a hint's payload. Protobuf parses 100 nested messages: a level of a payload needs three of them, and the
# messages around the payload the rest.
_PAYLOAD_LEVELS = 30
# Characters of a name in the path of a field.
_NAME_CHARACTERS = 64

Names = Sequence[tuple[str, str]]

NAMES: Names = (
    ("sampling.", ""),
    ("chat.messages", "messages"),
    ("chat", "messages"),
    ("token_ids.token_ids", "prompt"),
    ("text", "prompt"),
    ("token_ids", "tokens"),
    ("cache.salt", "cache_salt"),
    ("cache.retention_ranges", "retention.ranges"),
    ("cache.decode_retention_", "retention.decode."),
    ("cache.", ""),
)


def chat(request: ChatCompletionRequest) -> pb.StreamGenerateRequest:
    """Raises InvalidField for a field that no message has."""
    request.check()
    message = _generation(request)
    message.chat.CopyFrom(conversation(request.messages))
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if limit is not None:
        message.max_tokens = limit
    if request.logprobs:
        message.sampling.num_logprobs = request.top_logprobs or 0
    return message


def completion(request: CompletionRequest) -> list[pb.StreamGenerateRequest]:
    """One message per prompt. Raises InvalidField for a field that no message has."""
    request.check()
    shared = _generation(request)
    shared.max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if request.logprobs is not None:
        shared.sampling.num_logprobs = request.logprobs
    messages = []
    for prompt in request.prompt:
        message = pb.StreamGenerateRequest()
        message.CopyFrom(shared)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.token_ids.extend(prompt)
        messages.append(message)
    return messages


def tokenize(request: TokenizeRequest) -> pb.StreamGenerateRequest:
    """A message with the prompt only. Raises InvalidField."""
    request.check()
    if request.messages is not None:
        return pb.StreamGenerateRequest(model=request.model, chat=conversation(request.messages))
    return pb.StreamGenerateRequest(model=request.model, text=request.prompt)


def of_prompt(names: Names, number: int) -> Names:
    """The names for one of several prompts."""
    return tuple((ours, f"prompt[{number}]" if theirs == "prompt" else theirs) for ours, theirs in names)


def names(request: Generation) -> Names:
    """Names of the message's fields in a request."""
    is_chat = isinstance(request, ChatCompletionRequest)
    own = [("sampling.num_logprobs", "top_logprobs" if is_chat else "logprobs")]
    own.append(("input", "messages" if is_chat else "prompt"))
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        own.append(("max_tokens", "max_completion_tokens"))
    if request.cache_salt is None and request.extra_key is not None:
        own.append(("cache.salt", "extra_key"))
    if isinstance(request, ChatCompletionRequest):
        own.extend(_reasoning(request.messages))
    if request.session_id is None:
        own.append(("cache.session_id", "prompt_cache_key"))
    if request.prompt_cache_retention is not None:
        own.append(("cache.retention_ranges", "prompt_cache_retention"))
    return (*own, *NAMES)


def names_to_tokenize(request: TokenizeRequest) -> Names:
    """Names of the message's fields in a request of /tokenize."""
    return (*_reasoning(request.messages or ()), *NAMES)


def _reasoning(messages: Iterable[Message]) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages):
        if message.reasoning_content:
            yield f"chat.messages[{index}].reasoning", f"messages[{index}].reasoning_content"


def conversation(messages: Iterable[Message]) -> pb.ChatInput:
    """The messages with their cache breakpoints. Raises InvalidField for a message without content."""
    chat = pb.ChatInput()
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise InvalidField(f"messages[{index}].content", "is missing")
        if message.reasoning and message.reasoning_content not in (None, "", message.reasoning):
            raise InvalidField(f"messages[{index}].reasoning", "cannot be given with another reasoning_content")
        parts = message.content or ()
        said = chat.messages.add(
            role=message.role,
            content=PART_SEPARATOR.join(part.text for part in parts),
            name=message.name,
            reasoning=message.reasoning_content or message.reasoning,
        )
        end = -len(PART_SEPARATOR)
        for number, part in enumerate(parts, 1):
            end += len(PART_SEPARATOR) + len(part.text)
            is_last = number == len(parts)
            if control := part.cache_control or (message.cache_control if is_last else None):
                said.cache_breakpoints.add(
                    content_end=end,
                    retention_priority=CACHED_PRIORITY,
                    retention_duration=duration(control.ttl),
                )
    return chat


def _generation(request: Generation) -> pb.StreamGenerateRequest:
    message = pb.StreamGenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=_sampling(request),
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        n=request.n,
        cache=_cache(request),
    )
    if request.eviction_policy is not None:
        message.eviction_policy.CopyFrom(_policy(request.eviction_policy))
    return message


def _sampling(request: Generation) -> pb.SamplingParams:
    return pb.SamplingParams(
        # The service's default is greedy, OpenAI's is 1.
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=None if request.seed is None else request.seed % (1 << 64),
    )


def _cache(request: Generation) -> pb.CacheOptions:
    if request.cache_salt is not None and request.extra_key not in (None, request.cache_salt):
        raise InvalidField("extra_key", "cannot be given together with another cache_salt")
    cache = pb.CacheOptions(
        salt=request.extra_key if request.cache_salt is None else request.cache_salt,
        session_id=request.prompt_cache_key if request.session_id is None else request.session_id,
    )
    if request.retention is not None:
        _retain(cache, request.retention)
    if request.prompt_cache_retention is not None:
        if request.retention is not None:
            raise InvalidField("prompt_cache_retention", "cannot be given together with retention")
        lasts = duration(request.prompt_cache_retention)
        cache.retention_ranges.add(start=0, retention_priority=CACHED_PRIORITY, retention_duration=lasts)
        cache.decode_retention_priority = CACHED_PRIORITY
        cache.decode_retention_duration.CopyFrom(lasts)
    if request.kv_hints is not None:
        cache.kv_hints.CopyFrom(_hints(request.kv_hints))
    return cache


def _retain(cache: pb.CacheOptions, retention: Retention) -> None:
    for item in retention.ranges:
        cache.retention_ranges.add(
            start=item.start,
            end=item.end,
            retention_priority=item.priority,
            retention_duration=None if item.duration is None else duration(item.duration),
        )
    if retention.decode is not None:
        cache.decode_retention_priority = retention.decode.priority
        if retention.decode.duration is not None:
            cache.decode_retention_duration.CopyFrom(duration(retention.decode.duration))


def _policy(policy: EvictionPolicy) -> common.EvictionPolicy:
    """The fields have the same names."""
    return common.EvictionPolicy(**policy.model_dump(exclude_none=True))


def _hints(hints: KvHints) -> common.KvHints:
    """The fields have the same names. Raises InvalidField for a payload that no message holds."""
    for index, action in enumerate(hints.actions):
        _check_payload(action.payload, f"kv_hints.actions[{index}].payload", _PAYLOAD_LEVELS)
    return ParseDict(hints.model_dump(), common.KvHints())


def _check_payload(value: object, path: str, levels: int) -> None:
    """Raises InvalidField for the first value or name that no message holds."""
    if levels < 0:
        raise InvalidField(path, f"is nested more than {_PAYLOAD_LEVELS} levels deep")
    if isinstance(value, str) and not is_encodable(value):
        raise InvalidField(path, "must not have a half of a surrogate pair")
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise InvalidField(path, "must be a finite number that a double holds")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_payload(item, f"{path}[{index}]", levels - 1)
    if isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            if not is_encodable(name):
                raise InvalidField(path, f"must not have a half of a surrogate pair in the name of its field {index}")
            _check_payload(item, f"{path}.{name[:_NAME_CHARACTERS]}", levels - 1)


def duration(seconds: float) -> Duration:
    """The message for so many seconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
