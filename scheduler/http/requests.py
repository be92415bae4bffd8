"""What callers send: the types of OpenAI's requests, with the extensions. Values are checked where gRPC's are."""

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from protos.rpc.errors import InvalidField
from scheduler import intake
from scheduler.http.extensions import (
    Bounded,
    CacheControl,
    EvictionPolicy,
    Int32,
    Items,
    KvHints,
    Lasting,
    Retention,
    Text,
    Uint32,
    bounds,
)

# What a text looks like that was meant to be one of our names.
_CLOSE = 0.8
# Names of fields that are passed over in a request, and characters of them that are looked at.
_MAX_EXTRA = 64
# Of one request, as its samples.
MAX_PROMPTS = intake.MAX_SAMPLES


class OrText:
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


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


_ONE: list[dict[str, Any]] = [
    {"type": "string", "minLength": 1},
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
]
Prompts = Annotated[
    list[Text | list[int]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [*_ONE, *({"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": one} for one in _ONE)]}
    ),
]


StopText = Annotated[Text, Field(json_schema_extra={"minLength": 1})]


class Open(Bounded):
    """An object of OpenAI's: fields of other servers are passed over, if they ask for nothing that is not done here."""

    model_config = ConfigDict(extra="allow")

    # What is not done here, with the values that do not ask for it; null never does.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Names that are ours: what looks like one of them was meant to be it.
    extensions: ClassVar[tuple[str, ...]] = ()

    def objects(self) -> "Iterator[tuple[str, Open]]":
        """This and the open objects in it, each behind the beginning of its fields' paths."""
        yield "", self

    def check(self) -> None:
        """Raises InvalidField for a field that is misspelt or asks for what is not done."""
        names: set[str] = set()
        for path, one in self.objects():
            for name, value in (one.model_extra or {}).items():
                names.add(name)
                if len(names) > _MAX_EXTRA:
                    raise InvalidField(f"{path}{name}", f"is one of more than {_MAX_EXTRA} fields that are not known")
                if name in one.unsupported and value is not None and value not in one.unsupported[name]:
                    raise InvalidField(f"{path}{name}", "is not supported")
                if meant := _meant(name[:_MAX_EXTRA], one.extensions):
                    where = "it does not belong here" if name == meant else f"did you mean {meant}?"
                    raise InvalidField(f"{path}{name}", f"is not a field: {where}")


@functools.lru_cache(1024)
def _meant(name: str, extensions: tuple[str, ...]) -> str:
    """The extension that a name was meant to be, or nothing."""
    return next(iter(difflib.get_close_matches(name.lower(), extensions, n=1, cutoff=_CLOSE)), "")


def _of_text(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise ValueError("must be 'text': images, audio, video and files are not supported")
    return kind


class TextPart(Open):
    """A part of a message."""

    extensions = ("cache_control",)

    type: Annotated[Literal["text"], BeforeValidator(_of_text)]
    text: Text
    cache_control: CacheControl | None = None


class Message(Open):
    """One message of a conversation. Several parts are joined by line breaks."""

    unsupported: ClassVar = {"tool_calls": ([],), "function_call": (), "audio": ()}
    extensions = ("cache_control",)

    role: Text = Field(json_schema_extra={"minLength": 1})
    # An assistant's may be absent, as beside calls of tools.
    content: Annotated[Items[TextPart], OrText(lambda text: {"type": "text", "text": text})] | None = None
    # As on its last part.
    cache_control: CacheControl | None = None


def _few(value: object) -> object:
    """Before one is looked at; a part takes as long as a message."""
    if isinstance(value, list):
        count = len(value)
        if count <= intake.MAX_MESSAGES:
            contents = (one.get("content") for one in value if isinstance(one, dict))
            count += sum(len(content) - 1 for content in contents if isinstance(content, list))
        if count > intake.MAX_MESSAGES:
            raise ValueError(f"must have at most {intake.MAX_MESSAGES} entries and parts of them")
    return value


Messages = Annotated[Items[Message], BeforeValidator(_few), Field(json_schema_extra={"minItems": 1})]


class StreamOptions(Open):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="A last event has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Each event has the usage so far.")


class Generation(Open):
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
    extensions = (
        "cache_control",
        "cache_salt",
        "eviction_policy",
        "extra_key",
        "kv_hints",
        "prompt_cache_key",
        "prompt_cache_retention",
        "retention",
        "session_id",
    )

    model: Text = Field("", description="Empty is the one that is served.")
    n: Uint32 | None = Field(None, json_schema_extra=bounds(1, intake.MAX_SAMPLES))
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[Items[StopText], OrText(str)] | None = Field(
        None,
        description=f"At most {intake.MAX_STOPS}.",
        json_schema_extra={"maxItems": intake.MAX_STOPS, "minLength": 1},
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
    stop_token_ids: Items[Uint32] | None = Field(None, json_schema_extra={"maxItems": intake.MAX_STOP_IDS})
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
    prompt_cache_retention: Lasting | None = Field(
        None, description='How long the whole request stays cached, such as "24h"; "in_memory" is no wish.'
    )
    retention: Retention | None = None
    eviction_policy: EvictionPolicy | None = None
    kv_hints: KvHints | None = None

    def objects(self) -> Iterator[tuple[str, Open]]:
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
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "web_search_options": (),
    }

    messages: Messages
    max_completion_tokens: Uint32 | None = Field(None, json_schema_extra={"minimum": 1})
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = Field(None, json_schema_extra=bounds(0, intake.MAX_LOGPROBS))

    def objects(self) -> Iterator[tuple[str, Open]]:
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
    logprobs: Uint32 | None = Field(None, json_schema_extra=bounds(0, intake.MAX_LOGPROBS))


class TokenizeRequest(Open):
    """POST /tokenize: a text or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )
    unsupported: ClassVar = {
        "add_generation_prompt": (True,),
        "add_special_tokens": (True,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
    }

    model: Text = ""
    return_token_strs: bool | None = None
    prompt: Text | None = Field(None, json_schema_extra={"minLength": 1})
    messages: Messages | None = None

    def objects(self) -> Iterator[tuple[str, Open]]:
        """As of every open object."""
        yield from super().objects()
        yield from _said(self.messages or ())

    def check(self) -> None:
        """Raises InvalidField."""
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidField("prompt", "or messages must be given, and not both")


class DetokenizeRequest(Open):
    """POST /detokenize."""

    model: Text = ""
    tokens: Items[Uint32]


def _said(messages: Iterable[Message]) -> Iterator[tuple[str, Open]]:
    for index, message in enumerate(messages):
        yield f"messages[{index}].", message
        for number, part in enumerate(message.content or ()):
            yield f"messages[{index}].content[{number}].", part
