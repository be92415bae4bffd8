"""Callers' requests about a prompt's place in the cache: which blocks to keep, how long, and prompts without output."""

import json
from typing import Any

import openai
import pytest

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.openai import translate
from scheduler.frontend.openai.requests import ChatCompletionRequest, CompletionRequest
from tests.support.generation import generate
from tests.support.patience import patience
from tests.support.scheduler.http import ask
from tests.support.scheduler.stack import Stack, prompt_of

MARK = {"mode": "explicit"}


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | fields


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(*messages: dict[str, Any], **fields: Any) -> pb.StreamGenerateRequest:
    return translate.chat(ChatCompletionRequest(messages=list(messages), **fields))


def places(message: pb.StreamGenerateRequest) -> list[tuple[int, int, int]]:
    """Message, characters and seconds of every breakpoint."""
    return [
        (index, place.content_end, place.retention_duration.seconds)
        for index, said in enumerate(message.chat.messages)
        for place in said.cache_breakpoints
    ]


def test_breakpoints_last_as_long_as_they_say_or_the_request_does() -> None:
    marked = user(part("one", prompt_cache_breakpoint=MARK), part("two", prompt_cache_breakpoint=MARK | {"ttl": "12h"}))
    assert places(chat(marked)) == [(0, 3, 1800), (0, 7, 43_200)]
    explicit = chat(marked, prompt_cache_options={"mode": "explicit", "ttl": "1h"})
    assert places(explicit) == [(0, 3, 3600), (0, 7, 43_200)]
    assert explicit.cache.store_marked_only
    # The prompt's own breakpoint is the fourth.
    implicit = chat(marked, user(part("three")), prompt_cache_options={"ttl": "1h"})
    assert places(implicit) == [(0, 3, 3600), (0, 7, 43_200), (1, 5, 3600)]
    assert not implicit.cache.store_marked_only


def test_only_the_latest_four_breakpoints_count() -> None:
    history = [user(part(str(number), prompt_cache_breakpoint=MARK)) for number in range(6)]
    assert [place[0] for place in places(chat(*history))] == [2, 3, 4, 5]
    assert [place[:2] for place in places(chat(*history, prompt_cache_options={"ttl": "30m"}))] == [
        (3, 1), (4, 1), (5, 1), (5, 1),
    ]  # fmt: skip


def test_options_that_ask_for_nothing_change_nothing() -> None:
    plain = chat(user(part("x")))
    for options in ({}, {"mode": "implicit"}, {"ttl": None, "prewarm": False, "comparison_response_id": None}, None):
        assert chat(user(part("x")), prompt_cache_options=options, diagnostics=None) == plain
    assert chat(user(part("x")), diagnostics={"previous_message_id": None}) == plain


def test_a_comparison_is_one_in_both_shapes() -> None:
    for fields in (
        {"prompt_cache_options": {"comparison_response_id": "r"}},
        {"diagnostics": {"previous_message_id": "r"}},
        {"prompt_cache_options": {"comparison_response_id": "r"}, "diagnostics": {"previous_message_id": "r"}},
    ):
        assert chat(user(part("x")), **fields).cache.comparison_request_id == "r"


def test_a_completion_is_kept_as_a_whole() -> None:
    [message] = translate.completion(CompletionRequest(prompt="x", prompt_cache_options={"ttl": 60, "prewarm": True}))
    [kept] = message.cache.retention_ranges
    assert (kept.start, kept.retention_priority, kept.retention_duration.seconds) == (0, 80, 60)
    assert not message.cache.HasField("decode_retention_priority")
    assert (message.HasField("max_tokens"), message.max_tokens) == (True, 0)


BAD: dict[str, dict[str, Any]] = {
    "prompt_cache_options.mode": {"prompt_cache_options": {"mode": "never"}},
    "prompt_cache_options.ttl": {"prompt_cache_options": {"ttl": "soon"}},
    "prompt_cache_options.ttl ": {"prompt_cache_options": {"ttl": -1}},
    "prompt_cache_options.prewarm": {"prompt_cache_options": {"prewarm": "yes"}},
    "prompt_cache_options.lifetime": {"prompt_cache_options": {"lifetime": 1}},
    "prompt_cache_options": {"prompt_cache_options": "explicit"},
    "prompt_cache_options.comparison_response_id": {"prompt_cache_options": {"comparison_response_id": ""}},
    "prompt_cache_options.comparison_response_id ": {"prompt_cache_options": {"comparison_response_id": "x" * 129}},
    "diagnostics": {"diagnostics": True},
    "diagnostics.previous_id": {"diagnostics": {"previous_id": "x"}},
    "diagnostics.previous_message_id": {"diagnostics": {"previous_message_id": 7}},
    "diagnostics.previous_message_id ": {"diagnostics": {"previous_message_id": ""}},
    "diagnostics.previous_message_id  ": {
        "diagnostics": {"previous_message_id": "a"}, "prompt_cache_options": {"comparison_response_id": "b"},
    },
    "messages[0].content[0].prompt_cache_breakpoint.mode": {
        "messages": [user(part("x", prompt_cache_breakpoint={"mode": "implicit"}))],
    },
    "messages[0].content[0].prompt_cache_breakpoint.ttl": {
        "messages": [user(part("x", prompt_cache_breakpoint=MARK | {"ttl": 0}))],
    },
    "messages[0].content[1].prompt_cache_breakpoint": {
        "messages": [
            user(part("x"), part("y", prompt_cache_breakpoint=MARK, cache_control={"type": "ephemeral"})),
        ],
    },
    "prompt_cache_retention": {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"},
    "n": {"max_tokens": 0, "n": 2},
    "n ": {"prompt_cache_options": {"prewarm": True}, "n": 2},
    "prompt_cache_options.prewarm ": {"prompt_cache_options": {"prewarm": True}, "max_tokens": 5},
    "min_tokens": {"max_tokens": 0, "min_tokens": 2},
}  # fmt: skip


async def test_a_wrong_field_is_named_as_the_caller_wrote_it(stack: Stack, address: str) -> None:
    for field, fields in BAD.items():
        body = json.dumps({"messages": [user(part("the cat"))]} | fields)
        answer = await ask(address, "POST", "/v1/chat/completions", body)
        assert (answer.status, answer.error["param"]) == (400, field.strip()), answer.body
    many = {"prompt": ["a", "b"], "prompt_cache_options": {"comparison_response_id": "r"}}
    answer = await ask(address, "POST", "/v1/completions", json.dumps(many))
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    both = {"prompt": "a", "prompt_cache_options": {"ttl": 5}, "retention": {"ranges": [{"priority": 1}]}}
    answer = await ask(address, "POST", "/v1/completions", json.dumps(both))
    assert (answer.status, answer.error["param"]) == (400, "prompt_cache_options.ttl")
    assert stack.manager.admissions == []


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"prompt_cache_options": {"prewarm": True}}])
async def test_a_prompt_is_computed_and_stored_and_nothing_generated(
    stack: Stack, caller: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    messages: Any = [{"role": "user", "content": "the cat sat on the mat and the dog"}]
    warm = await caller.chat.completions.create(model="", messages=messages, extra_body=fields)
    assert (warm.choices[0].message.content, warm.choices[0].finish_reason) == ("", "length")
    assert warm.usage is not None
    assert warm.usage.prompt_tokens_details is not None
    assert (warm.usage.completion_tokens, warm.usage.prompt_tokens_details.cached_tokens) == (0, 0)
    assert warm.usage.prompt_tokens_details.cache_write_tokens == warm.usage.prompt_tokens
    found = await caller.chat.completions.create(model="", messages=messages, max_tokens=2)
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1
    assert stack.metric("output_tokens_total") == found.usage.completion_tokens


async def test_a_stream_of_a_prompt_that_is_only_computed_has_one_event(address: str) -> None:
    body = {"prompt": "the cat", "max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}
    answer = await ask(address, "POST", "/v1/completions", json.dumps(body))
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["text"] for event in events if event["choices"]] == [""]
    assert events[0]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 0


async def test_over_grpc_no_token_is_a_length_too(stack: Stack) -> None:
    asked = pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=prompt_of(21)), max_tokens=0)
    output = await generate(stack.stub, asked, patience(30))
    assert (output.token_ids, output.finish_reason) == ([], pb.FINISH_REASON_LENGTH)
    assert (output.usage.output_tokens, output.usage.cache_write_tokens) == (0, 21)
    asked.max_tokens = 2
    assert (await generate(stack.stub, asked, patience(30))).usage.cached_tokens == 20


async def test_in_explicit_mode_only_what_is_marked_is_stored(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    library: Any = part("the cat sat on the mat and the dog", prompt_cache_breakpoint=MARK)
    explicit = {"prompt_cache_options": {"mode": "explicit"}}

    async def ask_about(text: str, **fields: Any) -> tuple[int, int, int]:
        messages: Any = [user(library, part(text))]
        answer = await caller.chat.completions.create(model="", messages=messages, max_tokens=2, **fields)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        details = answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens, details.cached_tokens or 0, details.cache_write_tokens or 0

    prompt, cached, written = await ask_about("and the cat and the dog", extra_body=explicit)
    [admission] = stack.manager.admissions
    assert (cached, written) == (0, admission.store_tokens // 4 * 4)
    assert 0 < admission.store_tokens < prompt - 8
    # Neither the question nor the answer is there.
    assert await ask_about("and the cat and the dog", extra_body=explicit) == (prompt, written, 0)


async def test_in_explicit_mode_without_a_mark_the_cache_is_not_used(stack: Stack) -> None:
    prompt = prompt_of(40)
    plain = pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=prompt), max_tokens=2, ignore_eos=True)
    unmarked = pb.StreamGenerateRequest()
    unmarked.CopyFrom(plain)
    unmarked.cache.store_marked_only = True
    usages = [(await generate(stack.stub, asked, patience(30))).usage for asked in (unmarked, plain, unmarked)]
    assert [(usage.cached_tokens, usage.cache_write_tokens) for usage in usages] == [(0, 0), (0, 40), (0, 0)]


async def test_store_tokens_bounds_what_is_left_behind(stack: Stack) -> None:
    asked = pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=prompt_of(40)), max_tokens=2, ignore_eos=True)
    asked.cache.store_tokens = 22
    usages = [(await generate(stack.stub, asked, patience(30))).usage for _ in range(2)]
    assert [(usage.cached_tokens, usage.cache_write_tokens) for usage in usages] == [(0, 20), (20, 0)]
