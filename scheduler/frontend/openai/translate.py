"""Turns OpenAI's requests into messages of the generation service, and translates names of fields back."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField
from scheduler.frontend.openai.extensions import (
    EvictionPolicy,
    KvHints,
    PromptCacheOptions,
    Retention,
    is_encodable,
)
from scheduler.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    Message,
    Templated,
    TokenizeRequest,
    ToolCall,
)
from scheduler.frontend.openai.structured import Form, form_of
from scheduler.frontend.tool_calls.definitions import MAX_LEVELS, MAX_TOOLS_BYTES
from scheduler.frontend.validation import MAX_BREAKPOINTS

# OpenAI's default for completions; a conversation has no bound except the context.
COMPLETION_TOKENS = 16
# Retention priority of breakpoints and prompt_cache_retention: above the default of 35, below 100, which pins have.
CACHED_PRIORITY = 80
# OpenAI's lifetime of a breakpoint, in seconds.
DEFAULT_TTL = 1800.0
# Joins the parts of a message, as in vLLM.
PART_SEPARATOR = "\n"
# Most nesting of a hint's payload. Protobuf parses 100 nested messages: a level of a payload needs three of them, and
# the messages around the payload need the rest.
_PAYLOAD_LEVELS = 30
# Most digits of any model's token ids.
_ID_DIGITS = 9
# Most characters of a name in the path of a field.
_NAME_CHARACTERS = 64

_CHOICES = {
    "auto": pb.TOOL_CHOICE_UNSPECIFIED,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
    "function": pb.TOOL_CHOICE_REQUIRED,
}

Names = Sequence[tuple[str, str]]

NAMES: Names = (
    ("sampling.", ""),
    ("chat.messages", "messages"),
    ("chat.tools", "tools"),
    ("chat.tool_choice", "tool_choice"),
    ("chat.tool_name", "tool_choice.function.name"),
    ("chat.single_tool_call", "parallel_tool_calls"),
    ("chat.template_arguments", "chat_template_kwargs"),
    ("chat.continue_final_message", "continue_final_message"),
    ("chat", "messages"),
    ("token_ids.token_ids", "prompt"),
    ("text", "prompt"),
    ("token_ids", "tokens"),
    ("prompt_truncation.max_tokens", "truncate_prompt_tokens"),
    ("cache.salt", "cache_salt"),
    ("cache.retention_ranges", "retention.ranges"),
    ("cache.decode_retention_", "retention.decode."),
    ("cache.", ""),
)


def chat(request: ChatCompletionRequest) -> pb.StreamGenerateRequest:
    """Converts a conversation. Raises InvalidField for fields that are unknown, unsupported or contradictory."""
    request.check()
    message = _generation(request)
    message.chat.CopyFrom(conversation(request.messages, request, request.prompt_cache_options))
    message.chat.single_tool_call = request.parallel_tool_calls is False
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if _is_prewarm(request, limit):
        limit = 0
    if limit is not None:
        message.max_tokens = limit
    if request.logprobs:
        message.sampling.num_logprobs = request.top_logprobs or 0
    return message


def completion(request: CompletionRequest) -> list[pb.StreamGenerateRequest]:
    """Returns one message per prompt. Raises InvalidField for fields that are unknown, unsupported or contradictory."""
    request.check()
    shared = _generation(request)
    shared.max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if _is_prewarm(request, request.max_tokens):
        shared.max_tokens = 0
    if shared.cache.HasField("comparison_request_id") and len(request.prompt) > 1:
        raise InvalidField("prompt", "must be a single prompt for a comparison with another response")
    options = request.prompt_cache_options
    if options is not None and options.ttl is not None and options.mode == "implicit":
        if shared.cache.retention_ranges:
            raise InvalidField(
                "prompt_cache_options.ttl", "cannot be given together with other retention of the prompt"
            )
        shared.cache.retention_ranges.add(retention_priority=CACHED_PRIORITY, retention_duration=duration(options.ttl))
    if request.logprobs is not None:
        shared.sampling.num_logprobs = request.logprobs
        if request.echo:
            shared.sampling.num_prompt_logprobs = max(request.logprobs, request.prompt_logprobs or 0)
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
    """Returns a message with only the prompt. Raises InvalidField."""
    request.check()
    if request.messages is not None:
        return pb.StreamGenerateRequest(model=request.model, chat=conversation(request.messages, request))
    return pb.StreamGenerateRequest(model=request.model, text=request.prompt)


def of_prompt(names: Names, number: int) -> Names:
    """Returns the names for one of several prompts."""
    return tuple((ours, f"prompt[{number}]" if theirs == "prompt" else theirs) for ours, theirs in names)


def names(request: GenerationFields) -> Names:
    """Returns the names of the message's fields in a request."""
    is_chat = isinstance(request, ChatCompletionRequest)
    own = [("sampling.num_logprobs", "top_logprobs" if is_chat else "logprobs")]
    own.append(("sampling.num_prompt_logprobs", "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"))
    own.append(("input", "messages" if is_chat else "prompt"))
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        own.append(("max_tokens", "max_completion_tokens"))
    if request.request_id is None and request.rid is not None:
        own.append(("request_id", "rid"))
    if request.cache_salt is None and request.extra_key is not None:
        own.append(("cache.salt", "extra_key"))
    if isinstance(request, ChatCompletionRequest):
        own.extend(_reasoning(request.messages))
    if (form := form_of(request)) is not None:
        own.extend(_form_names(form))
    else:
        # An engine behind a router compiles the form of the calls: each tool has a tag.
        own.extend(
            (f"structured_output.structural_tags.tags[{index}].json_schema", f"tools[{index}].function.parameters")
            for index in range(len(request.tools or ()) if isinstance(request, ChatCompletionRequest) else 0)
        )
        own.extend((f"structured_output.{kind}", "tools") for kind in ("json_schema", "structural_tags"))
    if request.session_id is None:
        own.append(("cache.session_id", "prompt_cache_key"))
    if request.prompt_cache_retention is not None:
        own.append(("cache.retention_ranges", "prompt_cache_retention"))
    is_anthropic = request.diagnostics is not None and request.diagnostics.previous_message_id is not None
    compared = "diagnostics.previous_message_id" if is_anthropic else "prompt_cache_options.comparison_response_id"
    own.append(("cache.comparison_request_id", compared))
    return (*own, *NAMES)


def _form_names(form: Form) -> Iterator[tuple[str, str]]:
    path, message = form
    kind = message.WhichOneof("form")
    if kind == "structural_tags":
        yield "structured_output.structural_tags.tags", f"{path}.structures"
    yield f"structured_output.{kind}", path
    yield "structured_output", path


def names_to_tokenize(request: TokenizeRequest) -> Names:
    """Returns the names of the message's fields in a request of /tokenize."""
    return (*_reasoning(request.messages or ()), *NAMES)


def _reasoning(messages: Iterable[Message]) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages):
        if message.reasoning_content:
            yield f"chat.messages[{index}].reasoning", f"messages[{index}].reasoning_content"


def conversation(
    messages: Sequence[Message], how: Templated, options: PromptCacheOptions | None = None
) -> pb.ChatInput:
    """Returns the messages with their cache breakpoints, and how to render them.

    Raises InvalidField for a message without content that is not the assistant's, for contradictory fields, and for
    arguments that no message can hold.
    """
    chat = pb.ChatInput(
        add_generation_prompt=how.add_generation_prompt, continue_final_message=how.continue_final_message
    )
    if arguments := _arguments(how):
        ParseDict(arguments, chat.template_arguments)
    _add_tools(chat, how)
    options = options or PromptCacheOptions()
    is_implicit = options.mode == "implicit" and options.ttl is not None
    # A history collects breakpoints: as with OpenAI, only the latest count.
    marked = sum(part.prompt_cache_breakpoint is not None for message in messages for part in message.content or ())
    ignored = marked + is_implicit - MAX_BREAKPOINTS
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise InvalidField(f"messages[{index}].content", "is missing")
        if message.reasoning and message.reasoning_content not in (None, "", message.reasoning):
            raise InvalidField(f"messages[{index}].reasoning", "cannot be given with another reasoning_content")
        parts = message.content or ()
        if message.cache_control is not None and not parts:
            raise InvalidField(f"messages[{index}].cache_control", "needs a content")
        said = chat.messages.add(
            role=message.role,
            content=PART_SEPARATOR.join(part.text for part in parts),
            name=message.name,
            reasoning=message.reasoning_content or message.reasoning,
            tool_calls=[_call(call) for call in message.tool_calls or ()],
            tool_call_id=message.tool_call_id,
        )
        end = -len(PART_SEPARATOR)
        for number, part in enumerate(parts, 1):
            end += len(PART_SEPARATOR) + len(part.text)
            is_last = number == len(parts)
            ttl = None
            if control := part.cache_control or (message.cache_control if is_last else None):
                ttl = control.ttl
            if part.prompt_cache_breakpoint is not None:
                if control:
                    field = f"messages[{index}].content[{number - 1}].prompt_cache_breakpoint"
                    raise InvalidField(field, "cannot be given together with cache_control")
                ttl = part.prompt_cache_breakpoint.ttl or options.ttl or DEFAULT_TTL if ignored <= 0 else None
                ignored -= 1
            if ttl is not None:
                _mark(said, end, ttl)
    if is_implicit and options.ttl is not None and chat.messages:
        _mark(chat.messages[-1], len(chat.messages[-1].content), options.ttl)
    return chat


def _call(call: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(id=call.id, function=pb.FunctionCall(name=call.function.name, arguments=call.function.arguments))


def _add_tools(chat: pb.ChatInput, request: Templated) -> None:
    """Adds the tools. Raises InvalidField for tools that are too large, or that no JSON text can hold."""
    texts, size = [], 0
    for index, tool in enumerate(request.tools or ()):
        try:
            texts.append(json.dumps(tool, ensure_ascii=False))
        except RecursionError:
            raise InvalidField(f"tools[{index}]", f"is nested more than {MAX_LEVELS} levels deep") from None
        size += len(texts[-1])
        # Checked before any value, because checking values takes longer.
        if size > MAX_TOOLS_BYTES:
            raise InvalidField("tools", f"have more than {MAX_TOOLS_BYTES} bytes")
        _check_payload(tool, f"tools[{index}]", MAX_LEVELS, MAX_LEVELS)
    chat.tools.extend(texts)
    # Without tools, no tool is called anyway.
    if request.tool_choice is not None and (request.tools or request.tool_choice.type not in ("none", "auto")):
        chat.tool_choice = _CHOICES[request.tool_choice.type]
        if request.tool_choice.function is not None:
            chat.tool_name = request.tool_choice.function.name


def request_id(request: GenerationFields) -> str | None:
    """Returns the id that the caller gives the request; None if there is none."""
    return request.rid if request.request_id is None else request.request_id


def _arguments(how: Templated) -> dict[str, object]:
    """Returns the variables of the template."""
    arguments: dict[str, object] = how.chat_template_kwargs or {}
    _check_payload(arguments, "chat_template_kwargs", _PAYLOAD_LEVELS)
    effort = how.reasoning_effort
    if effort is None:
        return arguments
    if arguments.get("reasoning_effort") not in (None, effort):
        raise InvalidField("reasoning_effort", "must be the same as in chat_template_kwargs")
    # As in vLLM: a template that does not read reasoning_effort may read enable_thinking.
    return {"enable_thinking": effort != "none"} | arguments | {"reasoning_effort": effort}


def _mark(said: pb.ChatMessage, end: int, ttl: float) -> None:
    said.cache_breakpoints.add(content_end=end, retention_priority=CACHED_PRIORITY, retention_duration=duration(ttl))


def _is_prewarm(request: GenerationFields, max_tokens: int | None) -> bool:
    """Raises InvalidField if the request also wants tokens."""
    if not (request.prompt_cache_options and request.prompt_cache_options.prewarm):
        return False
    if max_tokens:
        raise InvalidField("prompt_cache_options.prewarm", "cannot be given together with max_tokens above 0")
    return True


def _generation(request: GenerationFields) -> pb.StreamGenerateRequest:
    if request.request_id is not None and request.rid not in (None, request.request_id):
        raise InvalidField("rid", "cannot be given together with another request_id")
    message = pb.StreamGenerateRequest(
        request_id=request_id(request),
        model=request.model,
        sampling=_sampling(request),
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        n=request.n,
        cache=_cache(request),
        include_stop_text=request.include_stop_str_in_output or request.no_stop_trim,
        keep_special_tokens=request.skip_special_tokens is False,
    )
    if request.prompt_logprobs is not None:
        message.sampling.num_prompt_logprobs = request.prompt_logprobs
    if (form := form_of(request)) is not None:
        message.structured_output.CopyFrom(form[1])
    if (kept := request.truncate_prompt_tokens) is not None:
        message.prompt_truncation.keep_first = request.truncation_side == "right"
        if kept >= 0:
            message.prompt_truncation.max_tokens = kept
    if request.eviction_policy is not None:
        message.eviction_policy.CopyFrom(_policy(request.eviction_policy))
    return message


def _sampling(request: GenerationFields) -> pb.SamplingParams:
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
        logit_bias=_biases(request.logit_bias or {}),
        min_tokens=request.min_tokens,
        bad_words=request.bad_words,
        allowed_token_ids=request.allowed_token_ids,
    )


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Returns the biases by id. Raises InvalidField for a name that is not an id."""
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= _ID_DIGITS):
            raise InvalidField(f"logit_bias.{name[:_NAME_CHARACTERS]}", "must be named by a token id")
    return {int(name): bias for name, bias in biases.items()}


def _cache(request: GenerationFields) -> pb.CacheOptions:
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
    options, asked = request.prompt_cache_options, request.diagnostics
    compared = None if options is None else options.comparison_response_id
    previous = None if asked is None else asked.previous_message_id
    if previous is not None and compared not in (None, previous):
        raise InvalidField("diagnostics.previous_message_id", "must be the same as comparison_response_id")
    if (named := compared if previous is None else previous) is not None:
        cache.comparison_request_id = named
    cache.store_marked_only = options is not None and options.mode == "explicit"
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
    """Converts a policy, whose fields have the same names."""
    return common.EvictionPolicy(**policy.model_dump(exclude_none=True))


def _hints(hints: KvHints) -> common.KvHints:
    """Converts hints, whose fields have the same names. Raises InvalidField for a payload that no message can hold."""
    for index, action in enumerate(hints.actions):
        _check_payload(action.payload, f"kv_hints.actions[{index}].payload", _PAYLOAD_LEVELS)
    return ParseDict(hints.model_dump(), common.KvHints())


def _check_payload(value: object, path: str, levels: int, most: int = _PAYLOAD_LEVELS) -> None:
    """Raises InvalidField for the first value or name that no message can hold. levels: how many of `most` are left."""
    if levels < 0:
        raise InvalidField(path, f"is nested more than {most} levels deep")
    if isinstance(value, str) and not is_encodable(value):
        raise InvalidField(path, "must not have an unpaired surrogate")
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise InvalidField(path, "must be a finite number that a double holds")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_payload(item, f"{path}[{index}]", levels - 1, most)
    if isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            if not is_encodable(name):
                raise InvalidField(path, f"must not have an unpaired surrogate in the name of its field {index}")
            _check_payload(item, f"{path}.{name[:_NAME_CHARACTERS]}", levels - 1, most)


def duration(seconds: float) -> Duration:
    """Returns the message for a number of seconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
