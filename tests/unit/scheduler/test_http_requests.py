"""What of OpenAI's requests becomes what of ours."""

from collections.abc import Callable
from typing import Any, get_args

import openai.types.chat as openai_chat
import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField
from scheduler.frontend.openai import translate
from scheduler.frontend.openai.errors import from_service, rename
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


def test_what_is_absent_is_openais_default() -> None:
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


def test_every_field_has_its_place() -> None:
    message = chat(
        model="m", n=2, stop=["a", "b"], max_tokens=7, max_completion_tokens=8, temperature=0, top_p=0.5, seed=-1,
        presence_penalty=1, frequency_penalty=-1, top_k=-1, min_p=0.25, repetition_penalty=1.5, ignore_eos=True,
        stop_token_ids=[5], request_id="r", priority=-3, cache_salt="s", session_id="c", prompt_cache_key="k",
        logprobs=True, top_logprobs=4,
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
            frequency_penalty=-1, seed=(1 << 64) - 1, num_logprobs=4,
        ),
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


def test_parts_are_joined_and_say_where_the_prompt_is_to_stay_cached_up_to() -> None:
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


def test_the_cache_key_is_a_session_and_its_retention_a_wish_for_everything() -> None:
    cache = completion(prompt_cache_key="k", prompt_cache_retention="24h").cache
    assert cache.session_id == "k"
    [wish] = cache.retention_ranges
    assert (wish.start, wish.HasField("end"), wish.retention_duration.seconds) == (0, False, 86_400)
    assert cache.decode_retention_duration.seconds == 86_400
    assert not completion(prompt_cache_retention="in_memory").cache.retention_ranges


def test_fields_of_other_servers_are_passed_over_unless_they_ask_for_what_is_not_done() -> None:
    assert chat(user="u", metadata={"a": "b"}, tools=[], tool_choice="auto", response_format={"type": "text"}) == chat()
    for field, value in {
        "tools": [{}], "tool_choice": "required", "response_format": {"type": "json_schema"}, "logit_bias": {"1": 2},
        "min_tokens": 3, "guided_json": {}, "best_of": 2, "modalities": ["audio"], "verbosity": "low",
    }.items():  # fmt: skip
        with pytest.raises(InvalidField, match=f"^{field} is not supported"):
            chat(**{field: value})
    for field, value in {"echo": True, "suffix": "x", "prompt_logprobs": 0}.items():
        with pytest.raises(InvalidField, match=f"^{field} is not supported"):
            completion(**{field: value})


# Of llama.cpp, TGI, TensorRT-LLM, Ollama and transformers; nobody can list them all.
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
        "messages[0].content[0].": TokenizeRequest(
            messages=[{"role": "user", "content": [{"type": "text", "text": "x", f"{field}_": 1}]}]
        ),
    }.items():
        with pytest.raises(InvalidField) as caught:
            request.check()
        # What the service calls so is another field.
        error = from_service(caught.value, translate.NAMES).body["error"]
        assert str(error["param"]).removesuffix("_") == f"{path.strip()}{field}"
        assert "is not a field" in error["message"]


def test_a_field_that_is_null_asks_for_nothing() -> None:
    assert chat(grammar=None, messages=[HELLO[0] | {"tool_calls": None, "mood": None}]) == chat()


@pytest.mark.parametrize(
    ("written", "meant"),
    [("cache_slat", "cache_salt"), ("cacheSalt", "cache_salt"), ("sesion_id", "session_id"), ("kv_hint", "kv_hints"),
     ("retentions", "retention"), ("evictionpolicy", "eviction_policy"), ("prompt_cache_keys", "prompt_cache_key"),
     ("max_new_tokens", "max_tokens"), ("repeat_penalty", "repetition_penalty"), ("Temperature", "temperature")],
)  # fmt: skip
def test_an_unknown_field_is_refused_with_the_nearest_name(written: str, meant: str) -> None:
    with pytest.raises(InvalidField, match=f"^{written} is not a field: did you mean {meant}"):
        completion(**{written: "x"})


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
        assert set(kept["fields"]) >= {
            "/v1/chat/completions",
            "/v1/completions",
            "/tokenize",
            "/detokenize",
            "messages",
        }
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
def test_a_field_is_taken_refused_or_ignored_and_only_one_of_these(one: type[LenientModel]) -> None:
    assert len(known(one)) == len(one.model_fields) + len(one.unsupported) + len(one.ignored)
    described = one.model_json_schema()["properties"]
    assert set(described) == known(one)


@pytest.mark.parametrize(
    "field",
    ["regex", "ebnf", "json_schema", "stop_regex", "no_stop_trim", "lora_path", "custom_logit_processor", "input_ids",
     "thinking", "thinking_token_budget", "repetition_detection", "logprob_token_ids", "truncation_side", "vllm_xargs",
     "kv_transfer_params"],
)  # fmt: skip
def test_a_field_that_would_change_the_output_is_refused_by_name(field: str) -> None:
    for ask in (chat, completion):
        with pytest.raises(InvalidField, match=f"^{field} is not supported"):
            ask(**{field: {"some": 1}})


def test_an_extra_key_is_a_cache_salt() -> None:
    assert completion(extra_key="tenant").cache.salt == chat(extra_key="tenant").cache.salt == "tenant"
    assert completion(extra_key="same", cache_salt="same").cache.salt == "same"
    with pytest.raises(InvalidField, match=r"^extra_key cannot be given"):
        completion(extra_key="one", cache_salt="other")
    assert rename("cache.salt", translate.names(CompletionRequest(prompt="x", extra_key="one"))) == "extra_key"
    with pytest.raises(ValidationError):
        completion(extra_key=["a", "b"])


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
def test_an_error_names_the_field_that_was_sent(field: str) -> None:
    request = ChatCompletionRequest(messages=HELLO, **{field: "x"})
    with pytest.raises(InvalidField) as caught:
        request.check()
    told = from_service(caught.value, translate.names(request)).body["error"]
    assert (told["message"], told["param"]) == (f"{field} is not supported", field)


def test_calls_of_tools_in_a_history_are_refused_by_name() -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {}}]}
    for message in (call, call | {"content": None}):
        with pytest.raises(InvalidField, match=r"^messages\[1\]\.tool_calls is not supported"):
            chat(messages=[*HELLO, message])


def test_only_an_assistant_may_say_nothing() -> None:
    silent: dict[str, Any] = {"role": "assistant", "content": None}
    assert chat(messages=[*HELLO, silent]).chat.messages[1].content == ""
    for message in ({"role": "user"}, {"role": "user", "content": None}):
        with pytest.raises(InvalidField, match=r"^messages\[1\]\.content is missing"):
            chat(messages=[*HELLO, message])


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_said_to_be_none(kind: str) -> None:
    with pytest.raises(ValidationError, match="images, audio, video and files are not supported"):
        chat(messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 10**400, -(10**400)])
def test_a_number_of_a_payload_that_no_message_holds_is_named(value: float) -> None:
    action = {"action_id": "a", "action_type": "Pin", "payload": {"priority": value}}
    with pytest.raises(InvalidField, match=r"^kv_hints\.actions\[0\]\.payload\.priority must be a finite number"):
        chat(kv_hints={"actions": [action]})


@pytest.mark.parametrize("nest", [lambda value: {"a": value}, lambda value: [value]], ids=["objects", "lists"])
def test_a_payload_is_nested_so_deep_as_a_message_can_be(nest: Callable[[Any], Any]) -> None:
    value: Any = 1
    for _ in range(29):
        value = nest(value)
    hints: Any = {"actions": [{"action_id": "a", "action_type": "Pin", "payload": {"a": value}}]}
    message = chat(kv_hints=hints)
    assert pb.StreamGenerateRequest.FromString(message.SerializeToString()) == message
    hints["actions"][0]["payload"]["a"] = nest(value)
    with pytest.raises(InvalidField, match=r"^kv_hints\.actions\[0\]\.payload\..* is nested more than 30 levels deep"):
        chat(kv_hints=hints)


def test_an_unknown_name_is_shown_in_part() -> None:
    with pytest.raises(InvalidField) as caught:
        completion(**{"x" * 1_000_000: 1})
    assert caught.value.message == f"{'x' * 64} is not a field"


@pytest.mark.parametrize("to_dict", [ChatCompletionMessage.model_dump, ChatCompletionMessage.to_dict])
def test_an_answer_of_openais_client_can_come_back_in_a_history(to_dict: Callable[[Any], dict[str, Any]]) -> None:
    answer = to_dict(ChatCompletionMessage(role="assistant", content="hi", annotations=[]))
    assert chat(messages=[*HELLO, answer]) == chat(messages=[*HELLO, {"role": "assistant", "content": "hi"}])


def test_clients_own_records_of_a_message_are_ignored() -> None:
    records = {"id": "1", "timestamp": 1.5, "annotations": [], "opts": {"visible": True}, "refusal": None}
    records |= {"usage": {"total_tokens": 3}, "images": [], "thinking_blocks": []}
    part = {"type": "text", "text": "x", "id": "p", "annotations": []}
    assert len(chat(messages=[{"role": "user", "content": [part]} | records]).chat.messages) == 1
    assert len(chat(messages=[HELLO[0] | records] * 100).chat.messages) == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefix", True), ("tools", [{}]), ("tool_call_id", "c"), ("refusal", "no"), ("task", "title"),
     ("function_call", {}), ("audio", {"id": "a"})],
)  # fmt: skip
def test_what_a_message_asks_for_beside_its_text_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidField, match=rf"^messages\[1\]\.{field} is not supported"):
        chat(messages=[*HELLO, {"role": "assistant", "content": "x", field: value}])


def test_names_and_reasoning_go_with_their_message() -> None:
    spoken = {"role": "assistant", "content": "4", "name": "al"}
    for reasoning in (
        {"reasoning": "2+2"},
        {"reasoning_content": "2+2"},
        {"reasoning_content": "2+2", "reasoning": ""},
    ):
        request = ChatCompletionRequest(messages=[*HELLO, spoken | reasoning])
        [_, message] = translate.chat(request).chat.messages
        assert message == pb.ChatMessage(role="assistant", content="4", name="al", reasoning="2+2")
        sent = "reasoning_content" if "reasoning_content" in reasoning else "reasoning"
        for names in (
            translate.names(request),
            translate.names_to_tokenize(TokenizeRequest(messages=request.messages)),
        ):
            assert rename("chat.messages[1].reasoning", names) == f"messages[1].{sent}"
    with pytest.raises(InvalidField, match=r"^messages\[0\].reasoning cannot be given with another"):
        chat(messages=[spoken | {"reasoning": "a", "reasoning_content": "b"}])


def test_special_tokens_are_added_to_a_prompt_and_come_with_a_conversation() -> None:
    for given, other in (({"prompt": "x"}, {"messages": HELLO}), ({"messages": HELLO}, {"prompt": "x"})):
        own = "prompt" in given
        assert translate.tokenize(TokenizeRequest(**given, add_special_tokens=own)) == translate.tokenize(
            TokenizeRequest(**given)
        )
        with pytest.raises(InvalidField, match=r"^add_special_tokens is not supported with this value"):
            translate.tokenize(TokenizeRequest(**other, add_special_tokens=own))


def test_the_tokens_of_a_request_can_be_counted_as_it_is() -> None:
    request = {"messages": HELLO, "temperature": 0.5, "max_tokens": 5, "stream": True, "user": "u", "cache_salt": "s"}
    assert translate.tokenize(TokenizeRequest(**request)).chat == chat().chat
    for field, value in {"documents": [{}], "thinking": True, "tools": [{}], "truncate_prompt_tokens": 3}.items():
        with pytest.raises(InvalidField, match=f"^{field} is not supported"):
            translate.tokenize(TokenizeRequest(messages=HELLO, **{field: value}))


def test_what_would_take_long_to_look_at_is_refused() -> None:
    part = {"type": "text", "text": "x"}
    for messages in (HELLO * 4097, [{"role": "user", "content": [part] * 1025}] * 4):
        with pytest.raises(ValidationError, match="must have at most 4096 entries"):
            chat(messages=messages)
    assert len(chat(messages=HELLO * 4096).chat.messages) == 4096
    for payload in ({"x": "y" * 66_000}, {"x": [float("nan")] * 66_000}):
        hint = {"action_id": "a", "action_type": "b", "payload": payload}
        with pytest.raises(ValidationError, match="has more than 65536 bytes"):
            chat(kv_hints={"actions": [hint]})
    with pytest.raises(ValidationError, match="has more than 256 fields"):
        chat(**{f"x{index}": 1 for index in range(257)})
    with pytest.raises(ValidationError, match="at most 64 items"):
        chat(retention={"ranges": [{"priority": 1}] * 65})


@pytest.mark.parametrize(
    "wrong",
    [{"stop": [1] * 1000}, {"stop_token_ids": ["x"] * 1000}, {"messages": [{}] * 1000},
     {"messages": [{"role": "user", "content": [{}] * 1000}]}, {"retention": {"ranges": ["x"] * 60}},
     {"retention": {f"x{index}": 1 for index in range(1000)}}, {"kv_hints": {"actions": ["x"] * 1000}}],
)  # fmt: skip
def test_of_many_faults_not_all_are_written_down(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(**wrong)
    assert caught.value.error_count() < 5


def test_errors_name_fields_as_the_request_has_them() -> None:
    request = ChatCompletionRequest(messages=HELLO, max_completion_tokens=5, prompt_cache_key="k")
    names = translate.names(request)
    assert {field: rename(field, names) for field in (
        "sampling.top_p", "sampling.num_logprobs", "max_tokens", "chat.messages[1].role", "cache.salt",
        "cache.session_id", "cache.retention_ranges[2].retention_duration", "cache.decode_retention_priority",
        "cache.kv_hints.actions[0].action_id", "eviction_policy.recent_tokens", "stop[1]", "n",
    )} == {
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
    }  # fmt: skip
    plain = translate.names(CompletionRequest(prompt="x", session_id="s"))
    assert [rename(field, plain) for field in ("text", "token_ids.token_ids[3]", "sampling.num_logprobs", "max_tokens",
                                               "cache.session_id")] == [
        "prompt", "prompt[3]", "logprobs", "max_tokens", "session_id",
    ]  # fmt: skip


def test_every_kind_of_eviction_can_be_asked_for() -> None:
    for name, number in common.EvictionKind.items():
        if number:
            kind = name.removeprefix("EVICTION_KIND_").lower()
            assert completion(eviction_policy={"kind": kind}).eviction_policy.kind == number
    assert sorted(EvictionPolicy.model_fields) == sorted(
        field.name for field in common.EvictionPolicy.DESCRIPTOR.fields
    )
