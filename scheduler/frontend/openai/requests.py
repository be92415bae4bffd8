"""The types of OpenAI's requests, with the extensions. The validator that gRPC uses checks values."""

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
    JsonValue,
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

# An error suggests a field with at least this similarity to an unknown name: 0..1, as difflib measures it.
_CLOSE = 0.75
# Characters of an unknown name that an error shows and compares.
_MAX_NAME = 64
# Prompts of one request are bounded as its samples are.
MAX_PROMPTS = validation.MAX_SAMPLES


class ListOrText:
    """A list, or a text for a list of one element."""

    def __init__(self, element: Callable[[str], object]) -> None:
        """element: makes the element of a text."""
        self._element = element

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._listed, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _listed(self, value: object) -> object:
        return [self._element(value)] if isinstance(value, str) else value


def _prompts(value: object) -> object:
    """One prompt, as a text or token ids, or a list of prompts."""
    found = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(found) > MAX_PROMPTS:
        raise ValueError(f"has more than {MAX_PROMPTS} prompts")
    if all(isinstance(item, str) or (isinstance(item, list) and all(map(_is_id, item))) for item in found):
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
    # No union of two types: pydantic would name its branches as fields in errors.
    list[Annotated[str | list[int], SkipValidation, AfterValidator(_encodable_prompt)]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [*_ONE, *({"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": item} for item in _ONE)]}
    ),
]


StopText = Annotated[Text, Field(json_schema_extra={"minLength": 1})]


class LenientModel(LimitedModel):
    """An object of OpenAI's, in which other servers' fields are known. Any other field is refused unless it is null."""

    model_config = ConfigDict(extra="allow")

    # Refused fields, with the values that ask for nothing besides null.
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
        """This object and those in it, each with the prefix of its fields' paths."""
        yield "", self

    def check(self) -> None:
        """Raises InvalidField for an unknown field, and for a refused one."""
        for path, item in self.objects():
            for name, value in (item.model_extra or {}).items():
                if value is None or name in item.ignored:
                    continue
                if name not in item.unsupported:
                    raise _unknown(path, name, type(item).model_fields)
                if value not in item.unsupported[name]:
                    raise FieldError(f"{path}{name}", "is not supported")


def _unknown(path: str, name: str, fields: Iterable[str]) -> FieldError:
    shown = name[:_MAX_NAME]
    [*meant] = difflib.get_close_matches(shown.lower(), fields, n=1, cutoff=_CLOSE)
    return FieldError(f"{path}{shown}", "is not a field" + "".join(f": did you mean {field}?" for field in meant))


def _of_text(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise ValueError("must be 'text': images, audio, video and files are not supported")
    return kind


def _sampling(name: str) -> dict[str, JsonValue]:
    return bounds(*validation.SAMPLING_BOUNDS[name])


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _refused(names: str, *nothing: object) -> dict[str, tuple[object, ...]]:
    """Fields that are refused unless they have a value that asks for nothing."""
    return dict.fromkeys(names.split(), nothing)


class TextPart(LenientModel):
    """A part of a message."""

    # OpenAI's name for cache_control.
    unsupported: ClassVar = {"prompt_cache_breakpoint": ()}
    # Fields of answers that clients repeat in a history.
    ignored: ClassVar = frozenset({"annotations", "id"})

    type: Annotated[Literal["text"], BeforeValidator(_of_text)]
    text: Text
    cache_control: CacheControl | None = None


class Message(LenientModel):
    """One message of a conversation. Several parts are joined by line breaks."""

    unsupported: ClassVar = {
        **_refused("audio function_call phase task tool_call_id"),
        **_refused("images thinking_blocks tool_calls tools", []),
        "prefix": (False,),
        "refusal": ("",),
    }
    # Fields of answers that clients repeat in a history, and clients' own records.
    ignored: ClassVar = _names(
        "annotations created_at finish_reason id message_id metadata opts provider_specific_fields timestamp usage"
    )

    role: Text = Field(json_schema_extra={"minLength": 1})
    # Absent in an assistant's tool calls.
    content: Annotated[Items[TextPart], ListOrText(lambda text: {"type": "text", "text": text})] | None = None
    name: Text | None = Field(None, description="The speaker's name; only where the model's chat template reads it.")
    reasoning_content: Text | None = Field(
        None, description="The assistant's reasoning; only where the model's chat template reads it."
    )
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    # Stands for that of the last part.
    cache_control: CacheControl | None = None


def _few(value: object) -> object:
    """Bounds messages and their parts before any of them is parsed."""
    if isinstance(value, list):
        count = len(value)
        if count <= validation.MAX_MESSAGES:
            contents = (item.get("content") for item in value if isinstance(item, dict))
            count += sum(len(content) - 1 for content in contents if isinstance(content, list))
        if count > validation.MAX_MESSAGES:
            raise ValueError(f"must have at most {validation.MAX_MESSAGES} entries and parts of them")
    return value


Messages = Annotated[Items[Message], BeforeValidator(_few), Field(json_schema_extra={"minItems": 1})]


class StreamOptions(LenientModel):
    """Options of a stream."""

    # Padding against eavesdroppers is refused: a caller must not believe that it is there.
    unsupported: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="A last event has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Each event has the usage so far.")


class Generation(LenientModel):
    """Common fields of chat completions and completions."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_refused("best_of length_penalty", 1),
        **_refused(
            "logit_bias custom_params ec_transfer_params images_config kv_transfer_params session_params "
            "video_config vllm_xargs",
            {},
        ),
        "response_format": ({"type": "text"},),
        **_refused(
            "allowed_token_ids beam_width bootstrap_host bootstrap_port bootstrap_room custom_logit_processor "
            "disagg_prefill_dp_rank ebnf guided_choice guided_grammar guided_json guided_regex input_ids "
            "json_schema lora lora_path mm_payload prompt_logprobs regex repetition_detection "
            "sampling_logprobs_mode structured_outputs task thinking_token_budget truncate_prompt_tokens "
            "truncation_side"
        ),
        **_refused("bad_words logits_processors logprob_token_ids stop_regex", []),
        **_refused("data_parallel_rank min_tokens routed_dp_rank", 0),
        **_refused(
            "include_stop_str_in_output no_stop_trim return_cached_tokens_details "
            "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states "
            "return_input_ids_in_sglext return_meta_info return_mm_kwargs return_output_ids_in_sglext "
            "return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask "
            "return_spec_tokens_details return_token_ids return_token_offsets return_tokens_as_token_ids "
            "return_weight_versions use_beam_search watermark watermarking",
            False,
        ),
        "skip_special_tokens": (True,),
        "thinking": (False, {"type": "disabled"}),
    }
    # Records of other servers, the frequency of events, and options of refused features.
    ignored: ClassVar = _names(
        "custom_labels metadata rid safety_identifier service_tier store user stream_interval mm_processor_kwargs "
        "routed_experts_prompt_start routed_experts_start_len spaces_between_special_tokens"
    )

    model: Text = Field("", description="Empty is the served one.")
    n: Uint32 | None = Field(None, json_schema_extra=bounds(1, validation.MAX_SAMPLES))
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[Items[StopText], ListOrText(str)] | None = Field(
        None,
        description=f"At most {validation.MAX_STOPS}.",
        json_schema_extra={"maxItems": validation.MAX_STOPS, "minLength": 1},
    )
    max_tokens: Uint32 | None = Field(None, json_schema_extra={"minimum": 1})
    temperature: float | None = Field(
        None, description="1 when absent; 0 is greedy.", json_schema_extra=_sampling("temperature")
    )
    top_p: float | None = Field(None, json_schema_extra=bounds(1e-6, 1))
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    presence_penalty: float | None = Field(None, json_schema_extra=_sampling("presence_penalty"))
    frequency_penalty: float | None = Field(None, json_schema_extra=_sampling("frequency_penalty"))
    # Other servers' fields.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = Field(
        None, description="0 and -1 are the whole vocabulary."
    )
    min_p: float | None = Field(None, json_schema_extra=bounds(0, 0.999999))
    repetition_penalty: float | None = Field(None, json_schema_extra=_sampling("repetition_penalty"))
    ignore_eos: bool | None = None
    stop_token_ids: Items[Uint32] | None = Field(None, json_schema_extra={"maxItems": validation.MAX_STOP_IDS})
    request_id: Text | None = Field(None, description="Names the request; unique among running ones.")
    # Fields of the cache.
    priority: Int32 | None = Field(None, description="Of scheduling: higher runs first.")
    cache_salt: Text | None = Field(
        None, description="Only requests with an equal salt share cached blocks.", json_schema_extra={"minLength": 1}
    )
    extra_key: Text | None = Field(
        None, description="The cache_salt of requests that name none.", json_schema_extra={"minLength": 1}
    )
    session_id: Text | None = Field(
        None,
        description="Conversation of the retention requests: those of a later request replace those of an earlier one.",
        json_schema_extra={"minLength": 1},
    )
    prompt_cache_key: Text | None = Field(None, description="The session_id of requests that name none.")
    prompt_cache_retention: RetentionSeconds | None = Field(
        None, description='How long the whole request stays cached, such as "24h"; "in_memory" asks for nothing.'
    )
    retention: Retention | None = None
    eviction_policy: EvictionPolicy | None = None
    kv_hints: KvHints | None = None

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        yield from super().objects()
        if self.stream_options is not None:
            yield "stream_options.", self.stream_options

    def check(self) -> None:
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
    # Options of reasoning, media and tools, which are refused or no output has.
    ignored: ClassVar = Generation.ignored | _names(
        "include_reasoning separate_reasoning stream_reasoning max_dynamic_patch media_io_kwargs min_dynamic_patch "
        "parallel_tool_calls use_audio_in_video"
    )

    messages: Messages
    max_completion_tokens: Uint32 | None = Field(None, json_schema_extra={"minimum": 1})
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = Field(None, json_schema_extra=bounds(0, validation.MAX_LOGPROBS))

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        yield from super().objects()
        yield from _said(self.messages)

    def check(self) -> None:
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
    """POST /tokenize: a text or a conversation. A completion request can be sent as it is, to count its tokens."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )
    unsupported: ClassVar = {
        name: values for item in _GENERATING for name, values in item.unsupported.items() if name not in _OWN
    }
    ignored: ClassVar = frozenset().union(*({*item.model_fields, *item.ignored} for item in _GENERATING)) - {*_OWN}

    model: Text = ""
    return_token_strs: bool | None = None
    prompt: Text | None = Field(None, json_schema_extra={"minLength": 1})
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="Only true for a prompt, and false for messages, whose template has them."
    )

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        yield from super().objects()
        yield from _said(self.messages or ())

    def check(self) -> None:
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
