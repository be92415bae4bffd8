"""Validates a message and turns it into one Request per sample. gRPC and HTTP share these rules for callers' values."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import secrets
import time
from array import array
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct, Value

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2
from protos.kvcommon.eviction import Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc import tracing
from protos.rpc.durations import MAX_SECONDS
from protos.rpc.errors import InvalidField
from scheduler.errors import ContextLengthError, ModelNotFoundError
from scheduler.frontend.adapters import AdapterTable
from scheduler.frontend.chat_template import ChatTemplateError, Rendering, UnreadFieldError
from scheduler.frontend.comparisons import parts_of
from scheduler.frontend.grammars import ExecutorGrammars
from scheduler.frontend.model_info import ModelInfo, TooLongError, pack
from scheduler.frontend.tool_calls.definitions import (
    Tool,
    check_choice,
    check_marks,
    name_answers,
    read_calls,
    read_tools,
)
from scheduler.frontend.tool_calls.schema import arguments_schema, forced_calls_schema
from scheduler.frontend.tool_calls.tags import strict_calls
from scheduler.request import Adapter, CacheOptions, Request, ToolUse

MAX_REQUEST_ID_BYTES = 128
MAX_NAME_BYTES = 256
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_IDS = 256
MAX_LOGPROBS = 20
MAX_BIASES, MAX_BIAS = 1024, 100
MAX_BAD_WORDS, MAX_BAD_RUNS = 64, 256
MAX_FORM_BYTES = 262_144
# Least and greatest values. The bounds of presence_penalty and frequency_penalty are OpenAI's; the other bounds keep
# logits well within the range of float32.
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
# Most requests that one call aborts by their ids.
MAX_ABORTED = 1024
MAX_ARGUMENTS_BYTES = 65_536
# Whole numbers up to this are exact as doubles; protobuf's Struct converts all numbers to doubles.
_EXACT = 1 << 53
# Most names of models that an error shows.
_SHOWN_NAMES = 20
# The field that holds the prompt, by the kind of input.
_FIELDS = {"text": "text", "chat": "chat.messages", "token_ids": "token_ids.token_ids"}


class Breakpoint(NamedTuple):
    """A position in a conversation, and how long the prompt up to it stays cached; no duration means forever."""

    message: int
    characters: int
    priority: int
    duration: Duration | None


class Conversation(NamedTuple):
    """A conversation as templates read it. how: how to render it. use: how the output may use tools.

    size: bytes of all texts. tools: that may be called. form: what calls force on the output, if anything.
    """

    messages: list[dict[str, Any]]
    how: Rendering
    use: ToolUse
    size: int
    tools: Sequence[Tool] = ()
    form: common.StructuredOutput | None = None

    def forced_schemas(self) -> Iterator[tuple[str, str]]:
        """Yields the field and the schema of each tool's arguments, if calls are forced to follow the schema."""
        for index, tool in enumerate(self.tools):
            if (self.use.is_required or tool.strict) and self.use.name in ("", tool.name):
                yield f"chat.tools[{index}].function.parameters", arguments_schema(tool)


class RequestValidator:
    """Validates requests. Raises InvalidField, ModelNotFoundError, and PassedOnError if the executor cannot compile."""

    def __init__(
        self,
        model: ModelInfo,
        adapters: AdapterTable | None = None,
        grammars: ExecutorGrammars | None = None,
        *,
        max_prompt_bytes: int,
        onload_timeout: float,
    ) -> None:
        """adapters: what requests may name, None for none. onload_timeout: default of requests, in seconds.

        grammars: compiles forms of outputs, None if another process does.
        """
        self.model = model
        self.adapters = AdapterTable() if adapters is None else adapters
        self._grammars = grammars
        self._max_prompt_bytes = max_prompt_bytes
        self._onload_timeout = onload_timeout
        self._arrivals = itertools.count(1)

    async def validate(self, message: pb.StreamGenerateRequest) -> list[Request]:
        """Validates cheap things first, then tokenizes text in a thread. Returns a request per sample."""
        arrived_at = time.monotonic()
        _check_size(message)
        if len(message.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidField("request_id", f"has more than {MAX_REQUEST_ID_BYTES} bytes")
        adapter = self.check_model(message.model)
        sampling = _sampling(message.sampling, self._stop_token_ids(message))
        self._restrict(message, sampling)
        stop = _stop(message.stop)
        policy = parse(message.eviction_policy, self.model.layout) if message.HasField("eviction_policy") else None
        options = _cache_options(message)
        breakpoints = _breakpoints(message)
        timeout = self._timeout(message.cache)
        is_prewarm = message.HasField("max_tokens") and not message.max_tokens
        samples = message.n if message.HasField("n") else 1
        if not 1 <= samples <= MAX_SAMPLES:
            raise InvalidField("n", f"must be from 1 to {MAX_SAMPLES}")
        if is_prewarm and samples > 1:
            raise InvalidField("n", "must be 1 when no token is generated")
        if message.sampling.bad_words:
            runs = await self.model.token_runs(message.sampling.bad_words)
            sampling.bad_token_ids.extend(execution_pb2.TokenSequence(token_ids=run) for run in runs)
        conversation = await self._conversation(message)
        await self._compile(sampling, conversation)
        kept = self._kept_tokens(message, policy)
        prompt_ids, ends = await self._prompt_ids(message, conversation, breakpoints, kept)
        request_id = message.request_id or secrets.token_hex(8)
        max_tokens = self._max_tokens(message, len(prompt_ids), policy)
        if sampling.min_tokens and is_prewarm:
            raise InvalidField("sampling.min_tokens", "must be 0 when no token is generated")
        if sampling.min_tokens > max_tokens:
            raise InvalidField("sampling.min_tokens", f"must be at most max_tokens, which is {max_tokens}")
        first = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            arrival=next(self._arrivals),
            arrived_at=arrived_at,
            onload_timeout=timeout,
            stop=stop,
            include_stop_text=message.include_stop_text,
            keep_special_tokens=message.keep_special_tokens or self._marks_parts(conversation),
            tools=ToolUse() if conversation is None else conversation.use,
            priority=message.priority,
            cache=_marked(message.cache, _keeping(options, _breakpoint_ranges(breakpoints, ends)), ends),
            adapter=adapter,
            traceparent=tracing.current(),
            header_id=str(structlog.contextvars.get_contextvars().get("request_id", "")),
            is_prewarm=is_prewarm,
            parts=parts_of(message),
            response_id=message.cache.parts.request_id if message.cache.HasField("parts") else request_id,
        )
        return [first, *(self._sample(first, index) for index in range(1, samples))]

    def _marks_parts(self, conversation: Conversation | None) -> bool:
        return conversation is not None and self.model.marks_parts(has_tools=bool(conversation.how.tools))

    async def _compile(self, sampling: execution_pb2.SamplingParams, conversation: Conversation | None) -> None:
        """Has the form of the output compiled: the request's own form, or the form of its tool calls."""
        calls = None if conversation is None else conversation.form
        is_own = sampling.HasField("structured_output")
        if is_own and conversation is not None and conversation.use.is_required:
            raise InvalidField("structured_output", "cannot be given together with a tool_choice that forces calls")
        # Outputs with the request's own form have no calls.
        if calls is not None and not is_own:
            sampling.structured_output.CopyFrom(calls)
        if self._grammars is not None and sampling.HasField("structured_output"):
            form = sampling.structured_output
            field = f"structured_output.{form.WhichOneof('form')}" if is_own else "chat.tools"
            try:
                await self._grammars.compile(form, field)
            except InvalidField:
                # The error of a single part is more precise than the error of the whole form.
                parts = _tag_schemas(field, form) if conversation is None or is_own else conversation.forced_schemas()
                for part, schema in parts:
                    await self._grammars.compile(common.StructuredOutput(json_schema=schema), part)
                raise

    def forget_grammars(self) -> None:
        """Forgets the compiled forms, because the executor has lost them."""
        if self._grammars is not None:
            self._grammars.forget()

    def output_of(self, request: Request, token_ids: Sequence[int]) -> array[int]:
        """Returns ids that another engine has generated and that the request continues. Raises InvalidField."""
        if len(token_ids) >= request.max_tokens:
            raise InvalidField("output_token_ids", f"must be fewer than max_tokens, which is {request.max_tokens}")
        self._check_ids("output_token_ids", token_ids)
        return array("I", token_ids)

    def _sample(self, first: Request, index: int) -> Request:
        sampling = execution_pb2.SamplingParams()
        sampling.CopyFrom(first.sampling)
        sampling.seed = sample_seed(first.sampling.seed, index)
        # The first sample has computed the prompt.
        sampling.ClearField("num_prompt_logprobs")
        return replace(first, sample_index=index, arrival=next(self._arrivals), sampling=sampling)

    def _timeout(self, cache: pb.CacheOptions) -> float:
        if not cache.HasField("onload_timeout"):
            return self._onload_timeout
        return _duration("cache.onload_timeout", cache.onload_timeout).ToNanoseconds() / 1e9

    def check_model(self, name: str) -> Adapter | None:
        """Returns the adapter of a name, None for the model alone and for an empty name. Raises ModelNotFoundError."""
        if name in ("", *self.model.names):
            return None
        adapter = self.adapters.find(name)
        if adapter is None:
            names = [*self.model.names, *self.adapters.names][:_SHOWN_NAMES]
            served = " and ".join(map(repr, names)) + (" are" if len(names) > 1 else " is")
            said = "the only model here is" if len(names) == 1 else "the models here are"
            raise ModelNotFoundError(
                f"{said} {' and '.join(map(repr, names))}", fields={"model": f"is not served; {served}"}
            )
        return adapter

    async def encode(self, message: pb.StreamGenerateRequest, *, add_special: bool = True) -> array[int]:
        """Returns the ids of the prompt, however many; validates only the model and the prompt, with its tools.

        add_special: whether a text gets the special tokens that the tokenizer adds.
        """
        _check_size(message)
        self.check_model(message.model)
        conversation = await self._conversation(message)
        ids, _ = await self._encode(message, conversation, (), add_special=add_special)
        return ids

    async def decode(self, model: str, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of ids. skip_special: whether to leave out special tokens."""
        self.check_model(model)
        self._check_ids("token_ids", token_ids)
        return await self.model.decode(token_ids, skip_special=skip_special)

    async def _encode(
        self,
        message: pb.StreamGenerateRequest,
        conversation: Conversation | None,
        breakpoints: Sequence[Breakpoint],
        most: int | None = None,
        *,
        add_special: bool = True,
    ) -> tuple[array[int], Sequence[int]]:
        """Returns the prompt's ids, and the number of ids before each breakpoint. Raises TooLongError beyond `most`."""
        if conversation is not None:
            return await self._chat_ids(conversation, breakpoints, most)
        match message.WhichOneof("input"):
            case "text":
                self._check_bytes("text", len(message.text.encode()))
                return await self.model.encode_text(message.text, most, add_special=add_special), ()
            case "token_ids":
                return pack(message.token_ids.token_ids, most), ()
            case _:
                raise InvalidField("input", "is missing: give text, chat or token_ids")

    def _kept_tokens(self, message: pb.StreamGenerateRequest, policy: Policy | None) -> int | None:
        """Returns how many tokens of the prompt its truncation leaves at most; None without truncation."""
        if not message.HasField("prompt_truncation"):
            return None
        truncation = message.prompt_truncation
        if not truncation.HasField("max_tokens"):
            output = message.max_tokens if message.HasField("max_tokens") else 1
            # At least one token stays, so that the error says that max_tokens does not fit.
            return max(1, min(self.model.max_tokens - 1, self.model.longest(policy) - output))
        if truncation.max_tokens < 1:
            raise InvalidField("prompt_truncation.max_tokens", "must be at least 1")
        return truncation.max_tokens

    async def _prompt_ids(
        self,
        message: pb.StreamGenerateRequest,
        conversation: Conversation | None,
        breakpoints: Sequence[Breakpoint],
        kept: int | None,
    ) -> tuple[array[int], Sequence[int]]:
        """Returns the prompt's ids, and the number of ids before each breakpoint. kept: ids kept of a longer prompt."""
        field, fits = _FIELDS.get(message.WhichOneof("input"), ""), self.model.max_tokens - 1
        try:
            ids, ends = await self._encode(message, conversation, breakpoints, fits if kept is None else None)
            if kept is not None:
                start = 0 if message.prompt_truncation.keep_first else max(0, len(ids) - kept)
                ids, ends = pack(ids[start : start + kept], fits), [min(max(0, end - start), kept) for end in ends]
        except TooLongError as error:
            raise ContextLengthError(field, f"{error}; at most {fits} fit") from error
        if not ids:
            raise InvalidField(field, "must not be empty")
        if message.WhichOneof("input") == "token_ids" or not self.model.own_ids_fit:
            self._check_ids(field, ids)
        return ids, ends

    async def _conversation(self, message: pb.StreamGenerateRequest) -> Conversation | None:
        """Returns the conversation that is the prompt; None for any other prompt."""
        if message.WhichOneof("input") != "chat":
            return None
        chat = message.chat
        if not chat.messages:
            raise InvalidField("chat.messages", "must not be empty")
        for index, said in enumerate(chat.messages):
            if not said.role:
                raise InvalidField(f"chat.messages[{index}].role", "must not be empty")
        if not self.model.has_chat_template:
            raise InvalidField("chat", "cannot be used: the model has no chat template")
        check_marks(chat)
        how = self._rendering(chat)
        if chat.tools or any(said.tool_calls for said in chat.messages):
            # There may be megabytes of JSON to be read.
            conversation = await asyncio.to_thread(_read_conversation, chat, how, self.model)
        else:
            conversation = _read_conversation(chat, how, self.model)
        self._check_bytes("chat.messages", conversation.size)
        use = conversation.use
        if use.names and not self.model.reads_tools:
            raise InvalidField("chat.tools", "are not read by the model's chat template")
        if use.names and not use.is_required and not self.model.output_forms.calls:
            raise InvalidField(
                "chat.tools",
                "cannot be used: the chat template does not show in which form the model writes calls, and no setting "
                "TOOL_CALL_PARSER names the form",
            )
        if use.single and not use.is_required and not self.model.output_forms.has_calls:
            raise InvalidField("chat.single_tool_call", "is not supported: calls are not looked for in the output")
        return conversation

    async def _chat_ids(
        self, conversation: Conversation, breakpoints: Sequence[Breakpoint], most: int | None
    ) -> tuple[array[int], Sequence[int]]:
        places = [breakpoint_[:2] for breakpoint_ in breakpoints]
        try:
            return await self.model.encode_chat(
                conversation.messages, places, most, conversation.how, size=conversation.size
            )
        except ChatTemplateError as error:
            raise InvalidField("chat.messages", f"do not fit the model's chat template: {error}") from error
        except UnreadFieldError as error:
            field = f"chat.messages[{error.message}].{error.field}"
            raise InvalidField(field, "is not read by the model's chat template") from error

    def _rendering(self, chat: pb.ChatInput) -> Rendering:
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidField("chat.continue_final_message", "cannot be given together with add_generation_prompt")
        for name in chat.template_arguments.fields:
            if self.model.reserves(name):
                raise InvalidField(f"chat.template_arguments.{name}", "is set by the server, not by callers")
        asks = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
        return Rendering(asks, chat.continue_final_message, _plain_object(chat.template_arguments))

    def _check_bytes(self, field: str, size: int) -> None:
        if size == 0:
            raise InvalidField(field, "must not be empty")
        if size > self._max_prompt_bytes:
            raise InvalidField(field, f"has {size} bytes; at most {self._max_prompt_bytes} are allowed")

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        size = self.model.vocab_size
        # Fast, because a prompt may have very many ids while the event loop waits.
        if max(ids, default=0) >= size:
            index = next(index for index, token_id in enumerate(ids) if token_id >= size)
            raise InvalidField(f"{field}[{index}]", f"must be below {size}, the vocabulary's size")

    def _stop_token_ids(self, message: pb.StreamGenerateRequest) -> list[int]:
        if len(message.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidField("stop_token_ids", f"has more than {MAX_STOP_IDS} entries")
        self._check_ids("stop_token_ids", message.stop_token_ids)
        own = () if message.ignore_eos else self.model.eos_token_ids
        return sorted({*message.stop_token_ids, *own})

    def _restrict(self, message: pb.StreamGenerateRequest, resolved: execution_pb2.SamplingParams) -> None:
        """Adds the restrictions and biases of the output."""
        sampling, size = message.sampling, self.model.vocab_size
        _check_count("sampling.logit_bias", sampling.logit_bias, MAX_BIASES)
        for token_id, bias in sampling.logit_bias.items():
            field = f"sampling.logit_bias.{token_id}"
            if token_id >= size:
                raise InvalidField(field, f"must name an id below {size}, the vocabulary's size")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidField(field, f"must be between -{MAX_BIAS} and {MAX_BIAS}")
            resolved.logit_bias[token_id] = bias
        resolved.min_tokens = sampling.min_tokens
        _check_count("sampling.allowed_token_ids", sampling.allowed_token_ids, size)
        self._check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids)
        resolved.allowed_token_ids.extend(sampling.allowed_token_ids)
        _check_count("sampling.bad_words", sampling.bad_words, MAX_BAD_WORDS)
        for index, word in enumerate(sampling.bad_words):
            if not word.strip() or len(word.encode()) > MAX_STOP_BYTES:
                said = f"must have 1 to {MAX_STOP_BYTES} bytes, and not only spaces"
                raise InvalidField(f"sampling.bad_words[{index}]", said)
        _check_count("sampling.bad_token_ids", sampling.bad_token_ids, MAX_BAD_RUNS)
        for index, run in enumerate(sampling.bad_token_ids):
            field = f"sampling.bad_token_ids[{index}].token_ids"
            if not 1 <= len(run.token_ids) <= MAX_STOP_BYTES:
                raise InvalidField(field, f"must have 1 to {MAX_STOP_BYTES} entries")
            self._check_ids(field, run.token_ids)
            resolved.bad_token_ids.add(token_ids=run.token_ids)
        if message.HasField("structured_output"):
            _check_form(message.structured_output)
            resolved.structured_output.CopyFrom(message.structured_output)

    def _max_tokens(self, message: pb.StreamGenerateRequest, prompt_tokens: int, policy: Policy | None) -> int:
        fits = self.model.longest(policy) - prompt_tokens
        if not message.HasField("max_tokens"):
            return fits
        if message.max_tokens > fits:
            said = f"is more than fits after {prompt_tokens} prompt tokens, which is {fits}"
            raise ContextLengthError("max_tokens", said)
        # Computing a prompt always samples a token. With max_tokens 0, this token is dropped.
        return max(1, message.max_tokens)


def _check_count(field: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise InvalidField(field, f"has more than {most} entries")


def _check_form(form: common.StructuredOutput) -> None:
    """Raises InvalidField for a form that cannot be compiled; its compiler finds other errors."""
    kind = form.WhichOneof("form")
    if kind is None:
        raise InvalidField("structured_output", "must have a form")
    if form.ByteSize() > MAX_FORM_BYTES:
        raise InvalidField(f"structured_output.{kind}", f"has more than {MAX_FORM_BYTES} bytes")
    match kind:
        case "json_schema":
            _check_schema("structured_output.json_schema", form.json_schema)
        case "choice":
            if not form.choice.texts or not all(form.choice.texts):
                raise InvalidField("structured_output.choice", "must have at least one text, and no empty one")
        case "structural_tags":
            _check_tags(form.structural_tags)
        case _:
            if not getattr(form, kind):
                raise InvalidField(f"structured_output.{kind}", "must not be empty")


def _check_tags(tags: common.StructuralTags) -> None:
    field = "structured_output.structural_tags"
    if not tags.tags:
        raise InvalidField(f"{field}.tags", "must not be empty")
    if not all(tags.triggers):
        raise InvalidField(f"{field}.triggers", "must not have an empty text")
    for index, tag in enumerate(tags.tags):
        if not tag.begin.startswith(tuple(tags.triggers)):
            raise InvalidField(f"{field}.tags[{index}].begin", "must begin with one of the triggers")
        _check_schema(f"{field}.tags[{index}].json_schema", tag.json_schema)


def _check_schema(field: str, text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidField(field, f"is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidField(field, "is nested too deeply") from error
    if not isinstance(schema, dict | bool):
        raise InvalidField(field, "must be an object or a boolean")


def _check_size(message: pb.StreamGenerateRequest) -> None:
    """Refuses messages that would take long to validate."""
    if len(message.chat.messages) > MAX_MESSAGES:
        raise InvalidField("chat.messages", f"has more than {MAX_MESSAGES} entries")
    if message.cache.kv_hints.ByteSize() > MAX_HINTS_BYTES:
        raise InvalidField("cache.kv_hints", f"has more than {MAX_HINTS_BYTES} bytes")
    if message.chat.template_arguments.ByteSize() > MAX_ARGUMENTS_BYTES:
        raise InvalidField("chat.template_arguments", f"has more than {MAX_ARGUMENTS_BYTES} bytes")


def _read_conversation(chat: pb.ChatInput, how: Rendering, model: ModelInfo) -> Conversation:
    messages = [_said(f"chat.messages[{index}]", message) for index, message in enumerate(chat.messages)]
    name_answers(messages)
    tools = read_tools(chat)
    check_choice(chat, tools)
    texts = [text for said in messages for text in said.values() if isinstance(text, str)]
    texts += [call.function.arguments for message in chat.messages for call in message.tool_calls]
    texts += chat.tools
    if chat.tool_choice == pb.TOOL_CHOICE_NONE:
        tools = []
    single, is_required = chat.single_tool_call and bool(tools), chat.tool_choice == pb.TOOL_CHOICE_REQUIRED
    use = ToolUse(
        frozenset(tool.name for tool in tools),
        is_required=is_required,
        name=chat.tool_name,
        single=single,
    )
    how = how._replace(tools=[tool.definition for tool in tools])
    size = sum(len(text.encode()) for text in texts)
    return Conversation(messages, how, use, size, tools, _form_of_calls(tools, use, model))


def _form_of_calls(tools: Sequence[Tool], use: ToolUse, model: ModelInfo) -> common.StructuredOutput | None:
    """Returns the form that a choice of tools, or a strict tool, forces on the output."""
    if use.is_required:
        return common.StructuredOutput(json_schema=forced_calls_schema(tools, use.name, single=use.single))
    tags = strict_calls(tools, model.output_forms.calls, model.chat_template, single=use.single)
    return None if tags is None else common.StructuredOutput(structural_tags=tags)


def _tag_schemas(field: str, form: common.StructuredOutput) -> Iterator[tuple[str, str]]:
    """Yields the schemas of structural tags, each with its field."""
    for index, tag in enumerate(form.structural_tags.tags):
        yield f"{field}.tags[{index}].json_schema", tag.json_schema


def _said(field: str, message: pb.ChatMessage) -> dict[str, Any]:
    """Returns a message as templates read it, without empty optional fields. field: its path."""
    said = {"role": message.role, "content": message.content}
    more = {"name": message.name, "reasoning": message.reasoning} | read_calls(field, message)
    return said | {name: value for name, value in more.items() if value}


def _plain_object(struct: Struct) -> dict[str, object]:
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Value) -> object:
    """Returns a template argument as templates read it. Raises InvalidField for a number that JSON does not have."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return _plain_object(value.struct_value)
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidField("chat.template_arguments", "must have finite numbers only")
            return int(number) if number.is_integer() and abs(number) <= _EXACT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
    return None


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of a sample other than the first."""
    # A hash, because callers choose neighbouring seeds for requests that are to differ.
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big")


def _sampling(sampling: pb.SamplingParams, stop_token_ids: list[int]) -> execution_pb2.SamplingParams:
    """Resolves defaults and checks bounds. NaN fails every comparison."""
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
    if sampling.HasField("num_prompt_logprobs"):
        if sampling.num_prompt_logprobs > MAX_LOGPROBS:
            raise InvalidField("sampling.num_prompt_logprobs", f"must be at most {MAX_LOGPROBS}")
        resolved.num_prompt_logprobs = sampling.num_prompt_logprobs
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
        # Log-probabilities cannot be derived from cached keys and values.
        no_read=cache.no_read or message.sampling.HasField("num_prompt_logprobs"),
        no_store=cache.no_store,
        eviction_policy=message.eviction_policy if message.HasField("eviction_policy") else None,
        explain_miss=cache.explain_miss or cache.HasField("comparison_request_id"),
        store_tokens=cache.store_tokens if cache.HasField("store_tokens") else None,
        comparison_id=_comparison(cache),
    )


def _comparison(cache: pb.CacheOptions) -> str | None:
    if not cache.HasField("comparison_request_id"):
        return None
    if not cache.comparison_request_id:
        raise InvalidField("cache.comparison_request_id", "must not be empty when given")
    if len(cache.comparison_request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidField("cache.comparison_request_id", f"has more than {MAX_REQUEST_ID_BYTES} bytes")
    return cache.comparison_request_id


def _marked(cache: pb.CacheOptions, options: CacheOptions, ends: Sequence[int]) -> CacheOptions:
    """Returns the options; with store_marked_only, only the prompt up to the last breakpoint is stored.

    If there is no breakpoint then, the cache is neither read nor written. ends: tokens before each breakpoint.
    """
    if not cache.store_marked_only:
        return options
    if not ends:
        return replace(options, no_read=True, no_store=True)
    bounds = [ends[-1]] if options.store_tokens is None else [ends[-1], options.store_tokens]
    return replace(options, store_tokens=min(bounds))


def _breakpoints(message: pb.StreamGenerateRequest) -> list[Breakpoint]:
    """Returns the conversation's cache breakpoints in order."""
    breakpoints = []
    for index, said in enumerate(message.chat.messages):
        for number, breakpoint_ in enumerate(said.cache_breakpoints):
            field = f"chat.messages[{index}].cache_breakpoints[{number}]"
            if breakpoint_.content_end > len(said.content):
                raise InvalidField(f"{field}.content_end", "is after the end of the message's content")
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
    """Returns retention requests for the prompt's tokens. ends: tokens before each breakpoint.

    A range that ends at a breakpoint also precedes all later breakpoints. The range gets the highest priority and the
    longest duration of this breakpoint and the later breakpoints; no duration, which means forever, is the longest.
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
    """Returns the options with more retention requests."""
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
            raise InvalidField(f"{field}.start", "lies within another range")
        previous_end = requested.end if requested.HasField("end") else None
        if requested.HasField("retention_duration"):
            _duration(f"{field}.retention_duration", requested.retention_duration)
        config.ranges.append(requested)
    return config if config.ranges or config.HasField("decode_retention_priority") else None
