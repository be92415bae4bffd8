"""What callers send: the types of OpenAI's requests, with the extensions. Values are checked where gRPC's are."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SkipValidation,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from protos.rpc.errors import InvalidField
from scheduler.frontend import validation
from scheduler.frontend.openai.errors import FieldError
from scheduler.frontend.openai.extensions import (
    CacheControl,
    EvictionPolicy,
    Int32,
    Items,
    KvHints,
    LimitedModel,
    Retention,
    RetentionSeconds,
    Text,
    Uint32,
    bounds,
    encodable,
)

# How similar an unknown name is to the field that an error suggests: 0..1, as difflib measures it.
_CLOSE = 0.75
# Characters of an unknown name that an error shows and compares.
_MAX_NAME = 64
# Of one request, as its samples.
MAX_PROMPTS = validation.MAX_SAMPLES


class ListOrText:
    """A list for which a text may stand that is all of it."""

    def __init__(self, element: Callable[[str], object]) -> None:
        """element: what the list is to hold for the text."""
        self._element = element

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._listed, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _listed(self, value: object) -> object:
        return [self._element(value)] if isinstance(value, str) else value


def _prompts(value: object) -> object:
    """A text or the ids of one prompt, or a list of those."""
    found = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(found) > MAX_PROMPTS:
        raise ValueError(f"has more than {MAX_PROMPTS} prompts")
    if all(isinstance(one, str) or (isinstance(one, list) and all(map(_is_id, one))) for one in found):
        return found
    raise ValueError("must be a text or a list of token ids, or a list of texts or of such lists")


def _encodable_prompt(prompt: str | list[int]) -> str | list[int]:
    return encodable(prompt) if isinstance(prompt, str) else prompt


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


_ONE: list[dict[str, Any]] = [
    {"type": "string", "minLength": 1},
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
]
Prompts = Annotated[
    # Of two types each, without a branch for either: its name would be taken for a field's.
    list[Annotated[str | list[int], SkipValidation, AfterValidator(_encodable_prompt)]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [*_ONE, *({"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": one} for one in _ONE)]}
    ),
]


StopText = Annotated[Text, Field(json_schema_extra={"minLength": 1})]


class LenientModel(LimitedModel):
    """An object of OpenAI's, in which other servers' names are known. Any other name is refused, unless it is null."""

    model_config = ConfigDict(extra="allow")

    # Fields that are refused, with the values that ask for nothing; null never asks.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Fields that change no output.
    ignored: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        names = described["properties"]
        names |= {name: {"enum": [None, *values]} for name, values in cls.unsupported.items()}
        names |= {name: {"description": "Ignored."} for name in sorted(cls.ignored)}
        described["additionalProperties"] = False
        return described

    def objects(self) -> "Iterator[tuple[str, LenientModel]]":
        """This and the open objects in it, each behind the beginning of its fields' paths."""
        yield "", self

    def check(self) -> None:
        """Raises InvalidField for a field that is not known or asks for what is not done."""
        for path, one in self.objects():
            for name, value in (one.model_extra or {}).items():
                if value is None or name in one.ignored:
                    continue
                if name not in one.unsupported:
                    raise _unknown(path, name, type(one).model_fields)
                if value not in one.unsupported[name]:
                    raise FieldError(f"{path}{name}", "is not supported")


def _unknown(path: str, name: str, fields: Iterable[str]) -> FieldError:
    # A name may be of any length.
    shown = name[:_MAX_NAME]
    [*meant] = difflib.get_close_matches(shown.lower(), fields, n=1, cutoff=_CLOSE)
    return FieldError(f"{path}{shown}", "is not a field" + "".join(f": did you mean {field}?" for field in meant))


def _of_text(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise ValueError("must be 'text': images, audio, video and files are not supported")
    return kind


class TextPart(LenientModel):
    """A part of a message."""

    # OpenAI's way to say what cache_control says.
    unsupported: ClassVar = {"prompt_cache_breakpoint": ()}
    # Of parts of answers that come back in a history.
    ignored: ClassVar = frozenset({"annotations", "id"})

    type: Annotated[Literal["text"], BeforeValidator(_of_text)]
    text: Text
    cache_control: CacheControl | None = None


class Message(LenientModel):
    """One message of a conversation. Several parts are joined by line breaks."""

    unsupported: ClassVar = {
        "audio": (),
        "function_call": (),
        "images": ([],),
        "phase": (),
        "prefix": (False,),
        "refusal": ("",),
        "task": (),
        "thinking_blocks": ([],),
        "tool_call_id": (),
        "tool_calls": ([],),
        "tools": ([],),
    }
    # Of answers that come back in a history, and of clients' own records.
    ignored: ClassVar = frozenset(
        {
            "annotations",
            "created_at",
            "finish_reason",
            "id",
            "message_id",
            "metadata",
            "opts",
            "provider_specific_fields",
            "timestamp",
            "usage",
        }
    )

    role: Text = Field(json_schema_extra={"minLength": 1})
    # An assistant's may be absent, as beside calls of tools.
    content: Annotated[Items[TextPart], ListOrText(lambda text: {"type": "text", "text": text})] | None = None
    name: Text | None = Field(None, description="Who speaks; only where the model's chat template reads it.")
    reasoning_content: Text | None = Field(
        None, description="What the assistant thought; only where the model's chat template reads it."
    )
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    # As on its last part.
    cache_control: CacheControl | None = None


def _few(value: object) -> object:
    """Before one is looked at; a part takes as long as a message."""
    if isinstance(value, list):
        count = len(value)
        if count <= validation.MAX_MESSAGES:
            contents = (one.get("content") for one in value if isinstance(one, dict))
            count += sum(len(content) - 1 for content in contents if isinstance(content, list))
        if count > validation.MAX_MESSAGES:
            raise ValueError(f"must have at most {validation.MAX_MESSAGES} entries and parts of them")
    return value


Messages = Annotated[Items[Message], BeforeValidator(_few), Field(json_schema_extra={"minItems": 1})]


class StreamOptions(LenientModel):
    """Options of a stream."""

    # Padding against listeners: who asks for it must not believe that it is there.
    unsupported: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="A last event has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Each event has the usage so far.")


class Generation(LenientModel):
    """What both ways of generating have in common."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        # OpenAI's.
        "best_of": (1,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        # Of other servers: what would change the output.
        "allowed_token_ids": (),
        "bad_words": ([],),
        "beam_width": (),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "custom_params": ({},),
        "data_parallel_rank": (0,),
        "disagg_prefill_dp_rank": (),
        "ebnf": (),
        "ec_transfer_params": ({},),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "images_config": ({},),
        "include_stop_str_in_output": (False,),
        "input_ids": (),
        "json_schema": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "logprob_token_ids": ([],),
        "lora": (),
        "lora_path": (),
        "min_tokens": (0,),
        "mm_payload": (),
        "no_stop_trim": (False,),
        "prompt_logprobs": (),
        "regex": (),
        "repetition_detection": (),
        "return_cached_tokens_details": (False,),
        "return_flat_raw_output_top_logprobs": (False,),
        "return_flat_raw_top_logprobs_b64": (False,),
        "return_hidden_states": (False,),
        "return_input_ids_in_sglext": (False,),
        "return_meta_info": (False,),
        "return_mm_kwargs": (False,),
        "return_output_ids_in_sglext": (False,),
        "return_prompt_text": (False,),
        "return_prompt_token_ids": (False,),
        "return_routed_experts": (False,),
        "return_sampling_mask": (False,),
        "return_spec_tokens_details": (False,),
        "return_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_tokens_as_token_ids": (False,),
        "return_weight_versions": (False,),
        "routed_dp_rank": (0,),
        "sampling_logprobs_mode": (),
        "session_params": ({},),
        "skip_special_tokens": (True,),
        "stop_regex": ([],),
        "structured_outputs": (),
        "task": (),
        "thinking": (False, {"type": "disabled"}),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "use_beam_search": (False,),
        "video_config": ({},),
        "vllm_xargs": ({},),
        "watermark": (False,),
        "watermarking": (False,),
    }
    ignored: ClassVar = frozenset(
        {
            # For the records of OpenAI and other servers.
            "custom_labels",
            "metadata",
            "rid",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            # How often events come.
            "stream_interval",
            # Of media, routed experts and skip_special_tokens: false, which are refused.
            "mm_processor_kwargs",
            "routed_experts_prompt_start",
            "routed_experts_start_len",
            "spaces_between_special_tokens",
        }
    )

    model: Text = Field("", description="Empty is the one that is served.")
    n: Uint32 | None = Field(None, json_schema_extra=bounds(1, validation.MAX_SAMPLES))
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[Items[StopText], ListOrText(str)] | None = Field(
        None,
        description=f"At most {validation.MAX_STOPS}.",
        json_schema_extra={"maxItems": validation.MAX_STOPS, "minLength": 1},
    )
    max_tokens: Uint32 | None = Field(None, json_schema_extra={"minimum": 1})
    temperature: float | None = Field(None, description="1 when absent; 0 is greedy.", json_schema_extra=bounds(0, 100))
    top_p: float | None = Field(None, json_schema_extra=bounds(1e-6, 1))
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    presence_penalty: float | None = Field(None, json_schema_extra=bounds(-2, 2))
    frequency_penalty: float | None = Field(None, json_schema_extra=bounds(-2, 2))
    # Of other servers.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = Field(
        None, description="0 and -1 are the whole vocabulary."
    )
    min_p: float | None = Field(None, json_schema_extra=bounds(0, 0.999999))
    repetition_penalty: float | None = Field(None, json_schema_extra=bounds(0.01, 100))
    ignore_eos: bool | None = None
    stop_token_ids: Items[Uint32] | None = Field(None, json_schema_extra={"maxItems": validation.MAX_STOP_IDS})
    request_id: Text | None = Field(None, description="Names the request; unique among running ones.")
    # Of the cache.
    priority: Int32 | None = Field(None, description="Of scheduling: higher runs first.")
    cache_salt: Text | None = Field(
        None, description="Only requests with an equal salt share cached blocks.", json_schema_extra={"minLength": 1}
    )
    extra_key: Text | None = Field(
        None, description="The cache_salt of requests that name none.", json_schema_extra={"minLength": 1}
    )
    session_id: Text | None = Field(
        None,
        description="Conversation that the wishes belong to: a later request's take the place of an earlier one's.",
        json_schema_extra={"minLength": 1},
    )
    prompt_cache_key: Text | None = Field(None, description="The session_id of requests that name none.")
    prompt_cache_retention: RetentionSeconds | None = Field(
        None, description='How long the whole request stays cached, such as "24h"; "in_memory" is no wish.'
    )
    retention: Retention | None = None
    eviction_policy: EvictionPolicy | None = None
    kv_hints: KvHints | None = None

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        """As of every open object."""
        yield from super().objects()
        if self.stream_options is not None:
            yield "stream_options.", self.stream_options

    def check(self) -> None:
        """Raises InvalidField."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidField("stream_options", "is only for streams")


class ChatCompletionRequest(Generation):
    """POST /v1/chat/completions."""

    unsupported: ClassVar = {
        **Generation.unsupported,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "moderation": (),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    ignored: ClassVar = Generation.ignored | {
        # No output has a reasoning part.
        "include_reasoning",
        "separate_reasoning",
        "stream_reasoning",
        # Of media and tools, which are refused.
        "max_dynamic_patch",
        "media_io_kwargs",
        "min_dynamic_patch",
        "parallel_tool_calls",
        "use_audio_in_video",
    }

    messages: Messages
    max_completion_tokens: Uint32 | None = Field(None, json_schema_extra={"minimum": 1})
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = Field(None, json_schema_extra=bounds(0, validation.MAX_LOGPROBS))

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        """As of every open object."""
        yield from super().objects()
        yield from _said(self.messages)

    def check(self) -> None:
        """Raises InvalidField."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("top_logprobs", "needs logprobs: true")


class CompletionRequest(Generation):
    """POST /v1/completions."""

    unsupported: ClassVar = {
        **Generation.unsupported,
        "add_special_tokens": (True,),
        "echo": (False,),
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: Prompts
    logprobs: Uint32 | None = Field(None, json_schema_extra=bounds(0, validation.MAX_LOGPROBS))


_OWN = ("add_special_tokens", "model", "return_token_strs", "prompt", "messages")
_GENERATING = (CompletionRequest, ChatCompletionRequest)


class TokenizeRequest(LenientModel):
    """POST /tokenize: a text or a conversation. A request that generates can be sent as it is, to count its tokens."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )
    unsupported: ClassVar = {
        name: values for one in _GENERATING for name, values in one.unsupported.items() if name not in _OWN
    }
    ignored: ClassVar = frozenset().union(*({*one.model_fields, *one.ignored} for one in _GENERATING)) - {*_OWN}

    model: Text = ""
    return_token_strs: bool | None = None
    prompt: Text | None = Field(None, json_schema_extra={"minLength": 1})
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="Only what it is anyway: true for a prompt, false for messages, whose template has them."
    )

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        """As of every open object."""
        yield from super().objects()
        yield from _said(self.messages or ())

    def check(self) -> None:
        """Raises InvalidField."""
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidField("prompt", "or messages must be given, and not both")
        if self.add_special_tokens not in (None, self.messages is None):
            raise InvalidField("add_special_tokens", "is not supported with this value")


class DetokenizeRequest(LenientModel):
    """POST /detokenize."""

    unsupported: ClassVar = {"skip_special_tokens": (False,)}

    model: Text = ""
    tokens: Items[Uint32]


def _said(messages: Iterable[Message]) -> Iterator[tuple[str, LenientModel]]:
    for index, message in enumerate(messages):
        yield f"messages[{index}].", message
        for number, part in enumerate(message.content or ()):
            yield f"messages[{index}].content[{number}].", part
