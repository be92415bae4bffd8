"""The types of OpenAI's requests, with the extensions. The validator that gRPC uses checks values."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
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
    Diagnostics,
    EvictionPolicy,
    Int32,
    Items,
    KvHints,
    LimitedModel,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    Retention,
    RetentionSeconds,
    Text,
    Uint32,
    bounds,
    encodable,
    short,
)
from scheduler.frontend.openai.structured import Choice, FormText, ResponseFormat, Schema, StructuredOutputs
from scheduler.frontend.tool_calls.definitions import MAX_TOOLS, NAME_PATTERN

# An error suggests a field with at least this similarity to an unknown name: 0..1, as difflib measures it.
_CLOSE = 0.75
# Characters of an unknown name that an error shows and compares.
_MAX_NAME = 64
# Prompts of one request have the same limit as its samples.
MAX_PROMPTS = validation.MAX_SAMPLES


class ListOrText:
    """A list, or a text for a list of one element."""

    def __init__(self, element: Callable[[str], object], elements: str) -> None:
        """element: converts a text to an element. elements: what errors call the elements."""
        self._element = element
        self._elements = elements

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._listed, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _listed(self, value: object) -> object:
        if isinstance(value, str):
            return [self._element(value)]
        if isinstance(value, list):
            return value
        raise ValueError(f"must be a text or a list of {self._elements}")


class ObjectWith:
    """Refuses a value that is not an object, and names the fields that the object must have."""

    def __init__(self, fields: str) -> None:
        self._fields = fields

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if not isinstance(value, dict | LimitedModel):
            raise ValueError(f"must be an object with {self._fields}")
        return value


def _prompts(value: object) -> object:
    """Returns a list of prompts, from a list or from one prompt, which is a text or token ids."""
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
    # Not a union of two types: pydantic would name the branches as fields in errors.
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

    # Refused fields, with the values that are allowed, besides null, because they ask for nothing.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Fields that change no output.
    ignored: ClassVar[frozenset[str]] = frozenset()
    # Fields that an error suggests for dissimilar names.
    meant: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        names = described["properties"]
        names |= {name: {"enum": [None, *values]} for name, values in cls.unsupported.items()}
        names |= {name: {"description": "Ignored."} for name in sorted(cls.ignored)}
        described["additionalProperties"] = False
        return described

    def objects(self) -> "Iterator[tuple[str, LenientModel]]":
        """Yields this object and the objects in it, each with the prefix of its fields' paths."""
        yield "", self

    def check(self) -> None:
        """Raises InvalidField for an unknown or refused field."""
        for path, item in self.objects():
            for name, value in (item.model_extra or {}).items():
                if value is None or name in item.ignored:
                    continue
                if name not in item.unsupported:
                    raise _unknown(path, name, type(item).model_fields, item.meant)
                # In Python, True is 1.
                if not any(
                    value == one and isinstance(value, bool) is isinstance(one, bool) for one in item.unsupported[name]
                ):
                    raise FieldError(f"{path}{name}", "is not supported")


def _unknown(path: str, name: str, fields: Iterable[str], meant: Mapping[str, str]) -> FieldError:
    shown = name[:_MAX_NAME]
    close = difflib.get_close_matches(shown.lower(), fields, n=1, cutoff=_CLOSE)
    suggested = [meant[name]] if name in meant else close
    return FieldError(f"{path}{shown}", "is not a field" + "".join(f": did you mean {field}?" for field in suggested))


# Parts of an assistant's answer that are not for the next prompt.
_OWN_PARTS = ("refusal", "thinking", "redacted_thinking", "reasoning")


def _of_text(kind: object) -> object:
    if kind in _OWN_PARTS:
        raise ValueError("must be 'text': leave out the parts of an answer that are a refusal or reasoning")
    if isinstance(kind, str) and kind != "text":
        raise ValueError("must be 'text': images, audio, video and files are not supported")
    return kind


def _sampling(name: str) -> dict[str, JsonValue]:
    return bounds(*validation.SAMPLING_BOUNDS[name])


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _refused(names: str, *nothing: object) -> dict[str, tuple[object, ...]]:
    """Returns fields that are refused unless they have a value that asks for nothing."""
    return dict.fromkeys(names.split(), nothing)


class TextPart(LenientModel):
    """A part of a message."""

    # Fields of answers that clients repeat in a history.
    ignored: ClassVar = frozenset({"annotations", "id"})

    type: Annotated[Literal["text"], BeforeValidator(_of_text)]
    text: Text
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class FunctionCall(LenientModel):
    """A call of a function."""

    name: Text = Field(json_schema_extra={"pattern": NAME_PATTERN})
    arguments: Text = Field(description="JSON text of an object.")


class ToolCall(LenientModel):
    """A call of a tool, as answers have it."""

    # Fields of answers that clients repeat in a history.
    ignored: ClassVar = frozenset({"extra_content", "index", "provider_specific_fields"})

    id: Text = Field(json_schema_extra={"minLength": 1})
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(LenientModel):
    """One message of a conversation. Several parts are joined by line breaks."""

    unsupported: ClassVar = {
        **_refused("audio function_call phase task"),
        **_refused("images thinking_blocks tools", []),
        "prefix": (False,),
        "refusal": ("",),
    }
    # Fields of answers that clients repeat in a history, and clients' own records.
    ignored: ClassVar = _names(
        "annotations created_at finish_reason id message_id metadata opts provider_specific_fields reasoning_details "
        "timestamp usage"
    )
    meant: ClassVar = {"text": "content"}

    role: Text = Field(json_schema_extra={"minLength": 1})
    # Absent in an assistant's message that only calls tools.
    content: (
        Annotated[
            Items[Annotated[TextPart, ObjectWith("type and text")]],
            ListOrText(lambda text: {"type": "text", "text": text}, "parts"),
        ]
        | None
    ) = None
    name: Text | None = Field(None, description="The speaker's name; only where the model's chat template reads it.")
    reasoning_content: Text | None = Field(
        None, description="The assistant's reasoning; only where the model's chat template reads it."
    )
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    tool_calls: Items[ToolCall] | None = Field(None, description="The assistant's calls of tools.")
    tool_call_id: Text | None = Field(None, description="The call that the message answers; for the role tool only.")
    # Counts as the cache_control of the last part if that part has none.
    cache_control: CacheControl | None = None


def _few(value: object) -> object:
    """Bounds messages and their parts before any of them is parsed."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of objects with {_OF_MESSAGE}")
    count = len(value)
    if count <= validation.MAX_MESSAGES:
        contents = (item.get("content") for item in value if isinstance(item, dict))
        count += sum(len(content) - 1 for content in contents if isinstance(content, list))
    if count > validation.MAX_MESSAGES:
        raise ValueError(f"must have at most {validation.MAX_MESSAGES} entries and parts of them")
    return value


_OF_MESSAGE = "role and content"
Messages = Annotated[
    Items[Annotated[Message, ObjectWith(_OF_MESSAGE)]],
    BeforeValidator(_few),
    Field(json_schema_extra={"minItems": 1}),
]


_WORDS = ("none", "auto", "required")
_NAMED_CHOICE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": NAME_PATTERN},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON schema of the arguments."},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}


def _choice(value: object) -> object:
    """Turns a word into a choice of that type."""
    if not isinstance(value, str):
        return value
    if value not in _WORDS:
        raise ValueError(f"must be one of {', '.join(_WORDS)}, or name a function")
    return {"type": value}


class FunctionName(LenientModel):
    """Names a function."""

    name: Text


class ToolChoice(LenientModel):
    """Which tools are called: one function by its name, or none, any, or at least one."""

    type: Literal["function", "none", "auto", "required"]
    function: FunctionName | None = None


class Tooled(LenientModel):
    """Tools that an output may call."""

    tools: (
        Annotated[
            # Checked by the validator that gRPC uses.
            list[dict[str, Any]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
            WithJsonSchema({"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}),
        ]
        | None
    ) = Field(None, description="Functions that the model may call; only where its chat template reads them.")
    tool_choice: (
        Annotated[
            ToolChoice,
            BeforeValidator(_choice),
            WithJsonSchema({"anyOf": [{"enum": list(_WORDS)}, _NAMED_CHOICE]}),
        ]
        | None
    ) = Field(None, description="Whether tools are called; auto when absent.")

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        yield from super().objects()
        if self.tool_choice is not None:
            yield "tool_choice.", self.tool_choice
            if self.tool_choice.function is not None:
                yield "tool_choice.function.", self.tool_choice.function

    def check(self) -> None:
        super().check()
        if self.tool_choice is not None:
            function = self.tool_choice.function
            if self.tool_choice.type == "function" and not (function and function.name):
                raise FieldError("tool_choice.function.name", "is missing")
            if self.tool_choice.type != "function" and function:
                raise FieldError("tool_choice.function", "is only for a choice of the type function")


class StreamOptions(LenientModel):
    """Options of a stream."""

    # Padding against eavesdroppers is refused: a caller must not believe that it is there.
    unsupported: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="A last event has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Each event has the usage so far.")


class GenerationFields(LenientModel):
    """Common fields of chat completions and completions."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_refused("best_of length_penalty", 1),
        **_refused(
            "custom_params ec_transfer_params images_config kv_transfer_params session_params video_config vllm_xargs",
            {},
        ),
        **_refused(
            "beam_width bootstrap_host bootstrap_port bootstrap_room custom_logit_processor "
            "disagg_prefill_dp_rank input_ids lora lora_path mm_payload repetition_detection "
            "sampling_logprobs_mode task thinking_token_budget"
        ),
        **_refused("logits_processors logprob_token_ids stop_regex", []),
        **_refused("data_parallel_rank routed_dp_rank", 0),
        **_refused(
            "return_cached_tokens_details "
            "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states "
            "return_input_ids_in_sglext return_meta_info return_mm_kwargs return_output_ids_in_sglext "
            "return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask "
            "return_spec_tokens_details return_token_offsets return_tokens_as_token_ids "
            "return_weight_versions use_beam_search watermark watermarking",
            False,
        ),
        "thinking": (False, {"type": "disabled"}),
    }
    # Records for other servers, the frequency of events, and options of refused features.
    ignored: ClassVar = _names(
        "custom_labels metadata safety_identifier service_tier store user stream_interval mm_processor_kwargs "
        "routed_experts_prompt_start routed_experts_start_len spaces_between_special_tokens"
    )

    model: Text = Field("", description="Empty is the served model.")
    n: Uint32 | None = Field(None, json_schema_extra=bounds(1, validation.MAX_SAMPLES))
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[Items[StopText], ListOrText(str, "texts")] | None = Field(
        None,
        description=f"At most {validation.MAX_STOPS}.",
        json_schema_extra={"maxItems": validation.MAX_STOPS, "minLength": 1},
    )
    max_tokens: Uint32 | None = Field(None, description="With 0 the prompt is only computed and stored.")
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
    include_stop_str_in_output: bool | None = Field(
        None, description="The text ends with the stop text, or with the text of the stop id."
    )
    no_stop_trim: bool | None = Field(None, description="Another name of include_stop_str_in_output.")
    skip_special_tokens: bool | None = Field(None, description="True when absent: the text has no special tokens.")
    return_token_ids: bool | None = Field(None, description="The answer has the ids of the prompt and of the output.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = Field(
        None,
        description="Number of prompt tokens that stay; -1 keeps as many as fit together with max_tokens. The last "
        "tokens stay, unless truncation_side is right.",
        json_schema_extra={"not": {"const": 0}},
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side of the prompt where truncate_prompt_tokens removes tokens; left when absent."
    )
    prompt_logprobs: Uint32 | None = Field(
        None,
        description="Number of alternatives to each prompt token. The request uses no cached blocks. Not in streams.",
        json_schema_extra=bounds(0, validation.MAX_LOGPROBS),
    )
    logit_bias: dict[str, float] | None = Field(
        None,
        description=f"Added to the logits of ids, from -{validation.MAX_BIAS} to {validation.MAX_BIAS}.",
        json_schema_extra={"maxProperties": validation.MAX_BIASES},
    )
    min_tokens: Uint32 | None = Field(
        None, description="Fewest tokens of the output; a stop text in the text of these tokens does not end it."
    )
    bad_words: Items[Text] | None = Field(
        None, description="The output has none of them.", json_schema_extra={"maxItems": validation.MAX_BAD_WORDS}
    )
    allowed_token_ids: Items[Uint32] | None = Field(
        None, description="The only ids that the output may have, besides ids that end it."
    )
    # The form of the output.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(None, description="As structured_outputs.json.")
    guided_regex: FormText | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: Choice | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: FormText | None = Field(None, description="As structured_outputs.grammar.")
    regex: FormText | None = Field(None, description="As structured_outputs.regex.")
    ebnf: FormText | None = Field(None, description="As structured_outputs.grammar.")
    json_schema: Schema | None = Field(None, description="As structured_outputs.json.")
    request_id: Text | None = Field(None, description="Names the request; unique among the tenant's running requests.")
    rid: Text | None = Field(None, description="Another name of request_id.")
    # Fields of the cache.
    priority: Int32 | None = Field(None, description="Scheduling priority: requests with a higher priority run first.")
    cache_salt: Text | None = Field(
        None, description="Only requests with an equal salt share cached blocks.", json_schema_extra={"minLength": 1}
    )
    extra_key: Text | None = Field(None, description="Another name of cache_salt.", json_schema_extra={"minLength": 1})
    session_id: Text | None = Field(
        None,
        description="The conversation. Retention requests of a later request replace those of an earlier request.",
        json_schema_extra={"minLength": 1},
    )
    prompt_cache_key: Text | None = Field(None, description="Used as session_id where session_id is absent.")
    prompt_cache_options: PromptCacheOptions | None = None
    diagnostics: Diagnostics | None = None
    prompt_cache_retention: RetentionSeconds | None = Field(
        None,
        description='How long the whole request stays cached, such as "24h"; "in_memory" asks for nothing. '
        "OpenAI has replaced it by prompt_cache_options.",
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
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidField("prompt_logprobs", "is not supported in streams")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidField("truncation_side", "needs truncate_prompt_tokens")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidField("allowed_token_ids", "must not be empty")


TemplateArguments = Annotated[
    # Checked when they become a message, as a hint's payload.
    dict[Any, Any],
    BeforeValidator(partial(short, most=validation.MAX_ARGUMENTS_BYTES)),
    WithJsonSchema({"type": "object"}),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Templated(Tooled):
    """How the chat template renders messages."""

    add_generation_prompt: bool | None = Field(
        None, description="Whether the beginning of an answer follows; true when absent, unless a message is continued."
    )
    continue_final_message: bool | None = Field(None, description="The output continues the last message.")
    chat_template_kwargs: TemplateArguments | None = Field(
        None, description="Variables of the chat template, which ignores variables that it does not read."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="A variable of the chat template. It also sets enable_thinking, unless chat_template_kwargs does: "
        'false for "none", otherwise true.',
    )


class ChatCompletionRequest(GenerationFields, Templated):
    """POST /v1/chat/completions."""

    unsupported: ClassVar = {
        **GenerationFields.unsupported,
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "moderation": (),
        **_refused("separate_reasoning stream_reasoning", True),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    # Options of media, which are refused.
    ignored: ClassVar = GenerationFields.ignored | _names(
        "max_dynamic_patch media_io_kwargs min_dynamic_patch use_audio_in_video"
    )

    messages: Messages
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = Field(None, json_schema_extra=bounds(0, validation.MAX_LOGPROBS))
    parallel_tool_calls: bool | None = Field(None, description="False ends the output after its first call.")
    include_reasoning: bool | None = Field(None, description="False leaves the reasoning out of the answer.")

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        yield from super().objects()
        yield from _said(self.messages)

    def check(self) -> None:
        super().check()
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidField("max_completion_tokens", "cannot be given together with another max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs", "needs logprobs: true")


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    unsupported: ClassVar = {
        **GenerationFields.unsupported,
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: Prompts
    echo: bool | None = Field(
        None, description="Texts begin with their prompts; with logprobs, so do the log-probabilities."
    )
    logprobs: Uint32 | None = Field(None, json_schema_extra=bounds(0, validation.MAX_LOGPROBS))


_GENERATING = (CompletionRequest, ChatCompletionRequest)
_OWN = {"add_special_tokens", "model", "return_token_strs", "prompt", "messages", *Templated.model_fields}
# The whole prompt is counted.
_UNCOUNTED = _refused("truncate_prompt_tokens truncation_side")


class TokenizeRequest(Templated):
    """POST /tokenize: a text or a conversation. A completion request can be sent unchanged, to count its tokens."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )
    unsupported: ClassVar = _UNCOUNTED | {
        name: values
        for item in _GENERATING
        for name, values in item.unsupported.items()
        if name not in _OWN and not any(name in other.model_fields for other in _GENERATING)
    }
    ignored: ClassVar = (
        frozenset().union(*({*item.model_fields, *item.ignored} for item in _GENERATING)) - _OWN - _UNCOUNTED.keys()
    )

    model: Text = ""
    return_token_strs: bool | None = None
    prompt: Text | None = Field(None, json_schema_extra={"minLength": 1})
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="Whether to include the special tokens that the tokenizer adds; true for a prompt when absent. "
        "Must not be true with messages, whose template has these tokens.",
    )

    def objects(self) -> Iterator[tuple[str, LenientModel]]:
        yield from super().objects()
        yield from _said(self.messages or ())

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidField("prompt", "or messages must be given, and not both")
        if self.add_special_tokens and self.messages is not None:
            raise InvalidField("add_special_tokens", "is not supported with messages: their template has them")


class LoadAdapterRequest(LenientModel):
    """POST /v1/load_lora_adapter."""

    unsupported: ClassVar = {"load_inplace": (False,), "is_3d_lora_weight": (False,)}
    ignored: ClassVar = frozenset({"lora_int_id"})

    lora_name: Text = Field(description="Name by which requests call the adapter.", json_schema_extra={"minLength": 1})
    lora_path: Text = Field(
        description="Folder that PEFT has saved, below KVKEEP_EXECUTOR_ADAPTER_DIR; may be relative to that folder.",
        json_schema_extra={"minLength": 1},
    )


class UnloadAdapterRequest(LenientModel):
    """POST /v1/unload_lora_adapter."""

    ignored: ClassVar = frozenset({"lora_int_id"})

    lora_name: Text = Field(json_schema_extra={"minLength": 1})


class AbortRequest(LenientModel):
    """POST /abort_request with SGLang's fields, and POST /abort_requests with vLLM's. Exactly one field is given."""

    # Fields of SGLang, for its own processes.
    ignored: ClassVar = _names("abort_message finished_reason")

    rid: Text | None = Field(
        None, description="The request_id of a request, the id of its answer, or its X-Request-Id."
    )
    request_ids: Items[Text] | None = Field(None, max_length=validation.MAX_ABORTED)
    abort_all: bool | None = Field(None, description="All requests of all tenants; for operators only.")

    def check(self) -> None:
        super().check()
        if bool(self.rid) + bool(self.request_ids) + bool(self.abort_all) != 1:
            raise InvalidField("rid", "or request_ids or abort_all must be given, and only one of them")


class DetokenizeRequest(LenientModel):
    """POST /detokenize."""

    model: Text = ""
    tokens: Items[Uint32]
    skip_special_tokens: bool | None = Field(None, description="False when absent: the text has special tokens.")


def _said(messages: Iterable[Message]) -> Iterator[tuple[str, LenientModel]]:
    for index, message in enumerate(messages):
        yield f"messages[{index}].", message
        for number, part in enumerate(message.content or ()):
            yield f"messages[{index}].content[{number}].", part
        for number, call in enumerate(message.tool_calls or ()):
            yield f"messages[{index}].tool_calls[{number}].", call
            yield f"messages[{index}].tool_calls[{number}].function.", call.function
