"""How OpenAI's requests become our requests."""

from collections.abc import Callable
from typing import Any, get_args

import openai.types.chat as openai_chat
import pytest
from google.protobuf.json_format import MessageToDict
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField
from scheduler.frontend.openai import translate
from scheduler.frontend.openai.errors import FieldError, from_service, rename
from scheduler.frontend.openai.extensions import EvictionPolicy
from scheduler.frontend.openai.requests import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LenientModel,
    Message,
    StreamOptions,
    TextPart,
    TokenizeRequest,
)
from tests.support import peer_fields

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> pb.StreamGenerateRequest:
    return translate.chat(ChatCompletionRequest(**{"messages": HELLO} | fields))


def completions(**fields: Any) -> list[pb.StreamGenerateRequest]:
    return translate.completion(CompletionRequest(**{"prompt": "hello"} | fields))


def completion(**fields: Any) -> pb.StreamGenerateRequest:
    [message] = completions(**fields)
    return message


def test_an_absent_field_has_openais_default() -> None:
    message = chat()
    assert message == pb.StreamGenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hello")]),
        sampling=pb.SamplingParams(temperature=1, top_k=0),
        cache=pb.CacheOptions(),
    )
    assert not message.HasField("max_tokens")
    assert completion().max_tokens == 16
    # Null is absent.
    assert chat(temperature=None, stop=None, tools=None, n=None, seed=None) == message


def test_every_field_is_translated() -> None:
    message = chat(
        model="m", n=2, stop=["a", "b"], max_tokens=8, max_completion_tokens=8, temperature=0, top_p=0.5, seed=-1,
        presence_penalty=1, frequency_penalty=-1, top_k=-1, min_p=0.25, repetition_penalty=1.5, ignore_eos=True,
        stop_token_ids=[5], request_id="r", priority=-3, cache_salt="s", session_id="c", prompt_cache_key="k",
        logprobs=True, top_logprobs=4, logit_bias={"5": -3.5, "7": 100}, min_tokens=2, bad_words=["no", "never"],
        allowed_token_ids=[5, 6], response_format={"type": "json_object"},
        retention={"ranges": [{"end": 4, "priority": 1, "duration": "1.5m"}, {"start": 4, "priority": 2}],
                   "decode": {"priority": 3, "duration": 4}},
        kv_hints={"message_id": "h", "actions": [
            {"action_id": "a", "action_type": "Pin", "payload": {"owner": "o", "duration_seconds": 3}}]},
        eviction_policy={"kind": "adaptive_rkv", "start_tokens": 16, "positions": "compacted", "seed": 2,
                         "adaptive_rkv": {"attention_mass": 0.5}},
    )  # fmt: skip
    expected = pb.StreamGenerateRequest(
        request_id="r",
        model="m",
        chat=message.chat,
        max_tokens=8,
        sampling=pb.SamplingParams(
            temperature=0, top_k=0, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=1,
            frequency_penalty=-1, seed=(1 << 64) - 1, num_logprobs=4, logit_bias={5: -3.5, 7: 100}, min_tokens=2,
            bad_words=["no", "never"], allowed_token_ids=[5, 6],
        ),
        structured_output=common.StructuredOutput(json_schema='{"type": "object"}'),
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        priority=-3,
        n=2,
        cache=pb.CacheOptions(salt="s", session_id="c", decode_retention_priority=3),
        eviction_policy=common.EvictionPolicy(
            kind="EVICTION_KIND_ADAPTIVE_RKV", start_tokens=16, positions="EVICTION_POSITIONS_COMPACTED", seed=2,
            adaptive_rkv=common.AdaptiveRkv(attention_mass=0.5),
        ),
    )  # fmt: skip
    cache = expected.cache
    cache.retention_ranges.add(start=0, end=4, retention_priority=1).retention_duration.seconds = 90
    cache.retention_ranges.add(start=4, retention_priority=2)
    cache.decode_retention_duration.seconds = 4
    cache.kv_hints.protocol_version, cache.kv_hints.message_id = "0.1", "h"
    action = cache.kv_hints.actions.add(action_id="a", action_type="Pin", action_version="0.1")
    action.payload.update({"owner": "o", "duration_seconds": 3})
    assert message == expected


def test_prompts_are_text_or_ids_also_in_a_list() -> None:
    for prompt in ("hello", ["hello"]):
        assert completion(prompt=prompt).text == "hello"
    for ids in ([1, 2], [[1, 2]]):
        assert list(completion(prompt=ids).token_ids.token_ids) == [1, 2]
    assert [message.text for message in completions(prompt=["a", "b"], seed=7)] == ["a", "b"]
    several = completions(prompt=[[1], [2, 3], "c"], n=2, cache_salt="s", max_tokens=5)
    assert [list(message.token_ids.token_ids) for message in several] == [[1], [2, 3], []]
    assert {(message.n, message.cache.salt, message.max_tokens) for message in several} == {(2, "s", 5)}
    for wrong in ([1, "a"], ["a", 1], [-1], [[-1]], [True], 5, None, ["a"] * (MAX_PROMPTS + 1)):
        with pytest.raises(ValidationError):
            completions(prompt=wrong)


def test_parts_are_joined_and_have_breakpoints() -> None:
    parts = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "two"},
        {"type": "text", "text": "three", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    short = {"role": "user", "content": "four", "cache_control": {"type": "ephemeral", "ttl": 30}}
    [first, second] = chat(messages=[{"role": "system", "content": parts}, short]).chat.messages
    assert first.content == "one\ntwo\nthree"
    places = [(place.content_end, place.retention_duration.seconds) for place in first.cache_breakpoints]
    assert places == [(3, 300), (13, 3600)]
    assert {place.retention_priority for place in first.cache_breakpoints} == {80}
    assert [(place.content_end, place.retention_duration.seconds) for place in second.cache_breakpoints] == [(4, 30)]


def test_the_cache_key_is_a_session_and_its_retention_covers_everything() -> None:
    cache = completion(prompt_cache_key="k", prompt_cache_retention="24h").cache
    assert cache.session_id == "k"
    [kept] = cache.retention_ranges
    assert (kept.start, kept.HasField("end"), kept.retention_duration.seconds) == (0, False, 86_400)
    assert cache.decode_retention_duration.seconds == 86_400
    assert not completion(prompt_cache_retention="in_memory").cache.retention_ranges


def said(**fields: object) -> dict[str, Any]:
    """A conversation with another message."""
    return {"messages": [*HELLO, {"role": "assistant", "content": "x"} | fields]}


def hinted(**payload: object) -> dict[str, Any]:
    return {"kv_hints": {"actions": [{"action_id": "a", "action_type": "Pin", "payload": payload}]}}


PART = {"type": "text", "text": "x"}
OF_CHATS: dict[str, object] = {
    "modalities": ["audio"], "verbosity": "low", "chat_template": "x", "documents": [{}],
}  # fmt: skip
UNSUPPORTED: dict[str, object] = {
    "best_of": 2, "stop_regex": "x",
    "lora_path": "x", "input_ids": [1], "custom_logit_processor": "x", "thinking": True,
    "thinking_token_budget": 1, "repetition_detection": {}, "logprob_token_ids": [1],
    "vllm_xargs": {"x": 1}, "kv_transfer_params": {"x": 1},
}  # fmt: skip
OF_MESSAGES: dict[str, object] = {
    "prefix": True, "tools": [{}], "refusal": "no", "task": "title", "function_call": {}, "audio": {"id": "a"},
}  # fmt: skip
MEANT = {
    "cache_slat": "cache_salt", "cacheSalt": "cache_salt", "sesion_id": "session_id", "kv_hint": "kv_hints",
    "retentions": "retention", "evictionpolicy": "eviction_policy", "prompt_cache_keys": "prompt_cache_key",
    "max_new_tokens": "max_tokens", "repeat_penalty": "repetition_penalty", "Temperature": "temperature",
}  # fmt: skip
NO_DOUBLES = (float("inf"), -float("inf"), float("nan"), 10**400, -(10**400))
# Fields of a conversation, and the beginning of the error.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
    (
        said(content=None, tool_calls=None, cache_control={"type": "ephemeral"}),
        "messages[1].cache_control needs a content",
    ),
    *(({name: value}, f"{name} is not supported") for name, value in (OF_CHATS | UNSUPPORTED).items()),
    ({"best_of": True}, "best_of is not supported"),
    ({"truncation_side": "left"}, "truncation_side needs truncate_prompt_tokens"),
    ({"max_tokens": 7, "max_completion_tokens": 8}, "max_completion_tokens cannot be given together with another"),
    ({"separate_reasoning": 1}, "separate_reasoning is not supported"),
    *((said(**{name: value}), f"messages[1].{name} is not supported") for name, value in OF_MESSAGES.items()),
    *(({name: "x"}, f"{name} is not a field: did you mean {meant}") for name, meant in MEANT.items()),
    ({"x" * 1_000_000: 1}, f"{'x' * 64} is not a field"),
    *((hinted(x=value), "kv_hints.actions[0].payload.x must be a finite number") for value in NO_DOUBLES),
    *(
        ({"chat_template_kwargs": {"x": value}}, "chat_template_kwargs.x must be a finite number")
        for value in NO_DOUBLES
    ),
    ({"chat_template_kwargs": {"x": ["\ud800"]}}, "chat_template_kwargs.x[0] must not have an unpaired surrogate"),
    (
        {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
        "reasoning_effort must be the same as in chat_template_kwargs",
    ),
    (said(role="user", content=None), "messages[1].content is missing"),
    (said(reasoning="a", reasoning_content="b"), "messages[1].reasoning cannot be given with another"),
    ({"extra_key": "one", "cache_salt": "other"}, "extra_key cannot be given"),
    ({"rid": "one", "request_id": "other"}, "rid cannot be given"),
]
# Refused before it is translated.
INVALID: list[tuple[dict[str, Any], str]] = [
    (said(content=[{"type": "image_url"}]), "images, audio, video and files are not supported"),
    *(
        (said(content=[{"type": kind, kind: "no"}]), "leave out the parts of an answer")
        for kind in ("refusal", "thinking", "reasoning")
    ),
    ({"extra_key": ["a", "b"]}, "extra_key"),
    ({"messages": HELLO * 4097}, "must have at most 4096 entries"),
    ({"messages": [{"role": "user", "content": [PART] * 1025}] * 4}, "must have at most 4096 entries"),
    (hinted(x="y" * 66_000), "has more than 65536 bytes"),
    (hinted(x=[float("nan")] * 66_000), "has more than 65536 bytes"),
    ({"chat_template_kwargs": {"x": "y" * 66_000}}, "has more than 65536 bytes"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"rid": ["a", "b"]}, "rid"),
    ({"reasoning_effort": 1}, "reasoning_effort"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"continue_final_message": "yes"}, "continue_final_message"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"no_stop_trim": 1}, "no_stop_trim"),
    ({"return_token_ids": "all"}, "return_token_ids"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1 << 32}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"prompt_cache_options": {"ttl": 1e-10}}, "0.001"),
    ({f"x{index}": 1 for index in range(257)}, "has more than 256 fields"),
    ({"retention": {"ranges": [{"priority": 1}] * 65}}, "at most 64 items"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": True}}}, "strickt"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_a_conversation_is_refused_with_the_name_of_the_field(fields: dict[str, Any], words: str) -> None:
    request = ChatCompletionRequest(**{"messages": HELLO} | fields)
    with pytest.raises(InvalidField) as caught:
        translate.chat(request)
    error = from_service(caught.value, translate.names(request)).body["error"]
    assert error["message"].startswith(words)
    assert words.startswith(str(error["param"]))


@pytest.mark.parametrize(("fields", "words"), INVALID)
def test_a_conversation_is_refused_before_all_of_it_is_read(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        chat(**fields)


@pytest.mark.parametrize("kind", ["text", "json_object", "structural_tag"])
def test_a_schema_needs_a_format_that_reads_it(kind: str) -> None:
    with pytest.raises(FieldError, match=r"^response_format.json_schema needs type json_schema"):
        chat(response_format={"type": kind, "json_schema": {"schema": {}}, "structures": None})


def test_a_completion_is_refused_as_a_conversation_is() -> None:
    for field, value in (UNSUPPORTED | {"suffix": "x"}).items():
        with pytest.raises(InvalidField, match=f"^{field} is not supported"):
            completion(**{field: value})


def test_unknown_fields_of_nested_objects_may_be_null() -> None:
    for name, value in (("structured_outputs", {"regex": "a"}), ("response_format", {"type": "json_object"})):
        assert chat(**{name: value | {"whitespace_pattern": None}}) == chat(**{name: value})
        with pytest.raises(ValidationError, match="whitespace_pattern"):
            chat(**{name: value | {"whitespace_pattern": " "}})


def test_a_field_that_asks_for_nothing_is_ignored() -> None:
    assert len(chat(messages=HELLO * 4096).chat.messages) == 4096
    # Only an assistant may have no content.
    assert chat(**said(content=None)).chat.messages[1].content == ""
    assert chat(user="u", metadata={"a": "b"}, tools=[], tool_choice="auto", response_format={"type": "text"}) == chat()
    assert chat(tool_choice="none") == chat()
    assert chat(top_logprobs=0) == chat()
    details = {"reasoning_details": [{"type": "reasoning.text", "text": "x"}]}
    assert chat(**said(**details)) == chat(**said())
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    called = call | {"extra_content": {"google": {"thought_signature": "x"}}}
    assert chat(**said(tool_calls=[called])) == chat(**said(tool_calls=[call]))
    assert chat(grammar=None, messages=[HELLO[0] | {"tool_calls": None, "mood": None}]) == chat()


def test_the_tokens_of_a_request_can_be_counted_as_it_is() -> None:
    request = {"messages": HELLO, "temperature": 0.5, "max_tokens": 5, "stream": True, "user": "u", "cache_salt": "s"}
    assert translate.tokenize(TokenizeRequest(**request)).chat == chat().chat
    with pytest.raises(InvalidField, match=r"^add_special_tokens is not supported with messages"):
        translate.tokenize(TokenizeRequest(messages=HELLO, add_special_tokens=True))
    how = {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "continue_final_message": True}
    assert translate.tokenize(TokenizeRequest(messages=HELLO, **how)).chat == chat(**how).chat
    for field, value in {"documents": [{}], "thinking": True, "truncate_prompt_tokens": 3}.items():
        with pytest.raises(InvalidField, match=f"^{field} is not supported"):
            translate.tokenize(TokenizeRequest(messages=HELLO, **{field: value}))


# Of llama.cpp, TGI, TensorRT-LLM, Ollama and transformers.
@pytest.mark.parametrize(
    "field",
    ["adapter_id", "bad_words_ids", "do_sample", "enable_thinking", "extra_body", "grammar", "guided_decoding", "input",
     "max_new_tokens", "min_length", "mirostat", "n_predict", "no_repeat_ngram_size", "num_beams", "options",
     "reasoning", "repeat_penalty", "sampling_params", "stop_sequences", "text", "typical_p"],
)  # fmt: skip
def test_a_field_that_is_not_known_is_refused_wherever_it_stands(field: str) -> None:
    for path, request in {
        "": ChatCompletionRequest(messages=HELLO, **{field: 1}),
        "\t": CompletionRequest(prompt="x", **{field: 1}),
        "\n": TokenizeRequest(prompt="x", **{field: 1}),
        "\r": DetokenizeRequest(tokens=[1], **{field: 1}),
        "stream_options.": CompletionRequest(prompt="x", stream=True, stream_options={field: 1}),
        "messages[1].": ChatCompletionRequest(messages=[*HELLO, HELLO[0] | {f"{field}_": 1}]),
        "messages[0].content[0].": TokenizeRequest(messages=[{"role": "user", "content": [PART | {f"{field}_": 1}]}]),
    }.items():
        with pytest.raises(InvalidField) as caught:
            request.check()
        # What the service calls so is another field.
        error = from_service(caught.value, translate.NAMES).body["error"]
        assert str(error["param"]).removesuffix("_") == f"{path.strip()}{field}"
        assert "is not a field" in error["message"]


CLASSES: dict[str, type[LenientModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "messages": Message,
    "stream_options": StreamOptions,
}


def known(one: type[LenientModel]) -> set[str]:
    return {*one.model_fields, *one.unsupported, *one.ignored}


@pytest.mark.parametrize(("package", "version", "route", "fields"), [
    (package, kept["version"], route, fields)
    for package, kept in peer_fields.read().items() for route, fields in kept["fields"].items()
])  # fmt: skip
def test_every_field_of_other_servers_is_known(package: str, version: str, route: str, fields: list[str]) -> None:
    assert set(fields) - known(CLASSES[route]) == set(), (package, version)


def test_the_other_servers_were_read_whole() -> None:
    for kept in peer_fields.read().values():
        assert set(kept["fields"]) >= CLASSES.keys() - {"stream_options"}
        assert all(len(fields) >= 2 for fields in kept["fields"].values())


@pytest.mark.parametrize(
    ("params", "ours"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (openai_chat.ChatCompletionStreamOptionsParam, StreamOptions),
        (openai_chat.ChatCompletionContentPartTextParam, TextPart),
        *((kind, Message) for kind in get_args(openai_chat.ChatCompletionMessageParam)),
    ],
)
def test_every_field_of_openais_client_is_known(params: Any, ours: type[LenientModel]) -> None:
    fields = set(params.__annotations__)
    assert len(fields) >= 2
    assert fields - known(ours) == set()


@pytest.mark.parametrize("one", [*CLASSES.values(), TextPart])
def test_a_field_is_either_known_refused_or_ignored(one: type[LenientModel]) -> None:
    assert len(known(one)) == len(one.model_fields) + len(one.unsupported) + len(one.ignored)
    described = one.model_json_schema()["properties"]
    assert set(described) == known(one)


def test_a_rid_is_a_request_id() -> None:
    assert completion(rid="mine").request_id == chat(rid="mine", request_id="mine").request_id == "mine"
    assert rename("request_id", translate.names(CompletionRequest(prompt="x", rid="one"))) == "rid"


def test_an_extra_key_is_a_cache_salt() -> None:
    assert completion(extra_key="tenant").cache.salt == chat(extra_key="tenant").cache.salt == "tenant"
    assert completion(extra_key="same", cache_salt="same").cache.salt == "same"
    assert rename("cache.salt", translate.names(CompletionRequest(prompt="x", extra_key="one"))) == "extra_key"


@pytest.mark.parametrize("nest", [lambda value: {"a": value}, lambda value: [value]], ids=["objects", "lists"])
def test_a_payload_may_be_nested_as_deep_as_a_message(nest: Callable[[Any], Any]) -> None:
    value: Any = 1
    for _ in range(29):
        value = nest(value)
    hints: Any = {"actions": [{"action_id": "a", "action_type": "Pin", "payload": {"a": value}}]}
    message = chat(kv_hints=hints)
    assert pb.StreamGenerateRequest.FromString(message.SerializeToString()) == message
    hints["actions"][0]["payload"]["a"] = nest(value)
    with pytest.raises(InvalidField, match=r"^kv_hints\.actions\[0\]\.payload\..* is nested more than 30 levels deep"):
        chat(kv_hints=hints)


@pytest.mark.parametrize("to_dict", [ChatCompletionMessage.model_dump, ChatCompletionMessage.to_dict])
def test_an_answer_of_openais_client_can_be_repeated_in_a_history(to_dict: Callable[[Any], dict[str, Any]]) -> None:
    answer = to_dict(ChatCompletionMessage(role="assistant", content="hi", annotations=[]))
    assert chat(messages=[*HELLO, answer]) == chat(messages=[*HELLO, {"role": "assistant", "content": "hi"}])


def test_clients_own_records_of_a_message_are_ignored() -> None:
    records: dict[str, Any] = {"id": "1", "timestamp": 1.5, "annotations": [], "opts": {"visible": True}}
    records |= {"refusal": None, "usage": {"total_tokens": 3}, "images": [], "thinking_blocks": []}
    part = PART | {"id": "p", "annotations": []}
    assert chat(**said(content=[part], **records)) == chat(**said())


def test_names_and_reasoning_go_with_their_message() -> None:
    spoken = {"role": "assistant", "content": "4", "name": "al"}
    for sent, others in (("reasoning", {}), ("reasoning_content", {}), ("reasoning_content", {"reasoning": ""})):
        request = ChatCompletionRequest(messages=[*HELLO, spoken | {sent: "2+2"} | others])
        [_, message] = translate.chat(request).chat.messages
        assert message == pb.ChatMessage(role="assistant", content="4", name="al", reasoning="2+2")
        counting = TokenizeRequest(messages=request.messages)
        for names in (translate.names(request), translate.names_to_tokenize(counting)):
            assert rename("chat.messages[1].reasoning", names) == f"messages[1].{sent}"


@pytest.mark.parametrize(
    "wrong",
    [{"stop": [1] * 1000}, {"stop_token_ids": ["x"] * 1000}, {"messages": [{}] * 1000},
     {"messages": [{"role": "user", "content": [{}] * 1000}]}, {"retention": {"ranges": ["x"] * 60}},
     {"retention": {f"x{index}": 1 for index in range(1000)}}, {"kv_hints": {"actions": ["x"] * 1000}}],
)  # fmt: skip
def test_many_errors_are_not_all_listed(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(**wrong)
    assert caught.value.error_count() < 5


def test_errors_name_fields_as_the_request_has_them() -> None:
    request = ChatCompletionRequest(messages=HELLO, max_completion_tokens=5, prompt_cache_key="k")
    names = translate.names(request)
    for field, theirs in {
        "sampling.top_p": "top_p",
        "sampling.num_logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens",
        "chat.messages[1].role": "messages[1].role",
        "cache.salt": "cache_salt",
        "cache.session_id": "prompt_cache_key",
        "cache.retention_ranges[2].retention_duration": "retention.ranges[2].duration",
        "cache.decode_retention_priority": "retention.decode.priority",
        "cache.kv_hints.actions[0].action_id": "kv_hints.actions[0].action_id",
        "eviction_policy.recent_tokens": "eviction_policy.recent_tokens",
        "stop[1]": "stop[1]",
        "n": "n",
    }.items():
        assert rename(field, names) == theirs
    names = translate.names(CompletionRequest(prompt="x", session_id="s"))
    for field, theirs in {
        "text": "prompt", "token_ids.token_ids[3]": "prompt[3]", "sampling.num_logprobs": "logprobs",
        "max_tokens": "max_tokens", "cache.session_id": "session_id",
    }.items():  # fmt: skip
        assert rename(field, names) == theirs


def test_every_eviction_policy_can_be_requested() -> None:
    for name, number in common.EvictionKind.items():
        if number:
            kind = name.removeprefix("EVICTION_KIND_").lower()
            assert completion(eviction_policy={"kind": kind}).eviction_policy.kind == number
    assert sorted(EvictionPolicy.model_fields) == sorted(
        field.name for field in common.EvictionPolicy.DESCRIPTOR.fields
    )


def test_fields_of_other_servers_about_the_text_are_ours() -> None:
    for field in ("include_stop_str_in_output", "no_stop_trim"):
        assert completion(**{field: True}).include_stop_text
        assert not completion(**{field: False}).include_stop_text
    assert [completion(skip_special_tokens=value).keep_special_tokens for value in (None, True, False)] == [
        False, False, True,
    ]  # fmt: skip
    for given, expected in (
        ({"truncate_prompt_tokens": -1}, pb.PromptTruncation()),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, pb.PromptTruncation(max_tokens=5)),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, pb.PromptTruncation(max_tokens=5, keep_first=True)),
        ({"truncate_prompt_tokens": 0}, pb.PromptTruncation(max_tokens=0)),
    ):
        message = completion(**given)
        assert message.HasField("prompt_truncation")
        assert message.prompt_truncation == expected
    names = translate.names(CompletionRequest(prompt="x"))
    assert rename("prompt_truncation.max_tokens", names) == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {}}, {}),
        ({"chat_template_kwargs": {"a": 1, "b": [None, {"c": "d"}]}}, {"a": 1, "b": [None, {"c": "d"}]}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_arguments_are_for_the_template(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert MessageToDict(chat(**given).chat.template_arguments) == arguments
    names = translate.names(ChatCompletionRequest(messages=HELLO))
    assert rename("chat.template_arguments.messages", names) == "chat_template_kwargs.messages"
    assert rename("chat.continue_final_message", names) == "continue_final_message"
