"""Fields of other servers for prompts and answers: ends of the text, truncation, token ids, templates."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.openai.response_builder import CompletionResponseBuilder
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.http import HELLO, LEAST, ask
from tests.support.scheduler.stack import Stack, prompt_of, run
from tests.support.scheduler.tokenizers import EOS

LONG = LEAST | {"prompt": prompt_of(20), "max_tokens": 12}


async def whole_text(caller: openai.AsyncOpenAI, **fields: Any) -> str:
    """The text of a completion, which is the same in events."""
    asked = {"model": "fake", **LONG, "extra_body": fields}
    answer = await caller.completions.create(**asked)
    events = [event async for event in await caller.completions.create(**asked, stream=True)]
    assert "".join(event.choices[0].text for event in events) == answer.choices[0].text
    assert events[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    return answer.choices[0].text


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
async def test_what_ends_the_text_is_part_of_it_where_that_is_asked_for(
    stack: Stack, caller: openai.AsyncOpenAI, field: str
) -> None:
    text = await whole_text(caller)
    tokens = stack.executor.expected(LONG["prompt"], 12)
    middle = next(index for index in range(4, 12) if tokens.index(tokens[index]) == index)
    before, through = (stack.executor.tokenizer.decode(tokens[:end]) for end in (middle, middle + 1))
    # Bytes that are no characters: the places of texts could differ.
    if "\N{REPLACEMENT CHARACTER}" not in through:
        assert await whole_text(caller, stop_token_ids=[tokens[middle]]) == before
    assert await whole_text(caller, **{field: True, "stop_token_ids": [tokens[middle]]}) == through
    begin = len(text) // 2
    stop = text[begin : begin + 2]
    cut = text.index(stop)
    assert await whole_text(caller, stop=[stop]) == text[:cut]
    assert await whole_text(caller, stop=[stop], **{field: True}) == text[: cut + 2]
    assert await whole_text(caller, **{field: True}) == text


async def test_no_stop_text_is_looked_for_in_the_least_tokens(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    text = await whole_text(caller)
    assert await whole_text(caller, stop=[text[0]]) == ""
    least = stack.executor.tokenizer.decode(stack.executor.expected(LONG["prompt"], 6))
    assert (await whole_text(caller, stop=[text[0]], min_tokens=6)).startswith(least[:3])
    assert await whole_text(caller, stop=[text[0]], min_tokens=12) == text


@pytest.mark.parametrize(
    ("truncation", "max_tokens", "kept"),
    [
        (pb.PromptTruncation(max_tokens=7), 5, slice(-7, None)),
        (pb.PromptTruncation(max_tokens=7, keep_first=True), 5, slice(0, 7)),
        (pb.PromptTruncation(), 5, slice(-395, None)),
        (pb.PromptTruncation(), None, slice(-399, None)),
        (pb.PromptTruncation(max_tokens=1000), 5, None),
    ],
)
async def test_a_prompt_that_is_too_long_loses_one_end(
    stack: Stack, truncation: pb.PromptTruncation, max_tokens: int | None, kept: slice | None
) -> None:
    prompt = prompt_of(100 if kept is None else 900)
    asked = pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=prompt), max_tokens=max_tokens, ignore_eos=True, prompt_truncation=truncation
    )
    [output] = await run(stack, asked)
    rest = prompt if kept is None else prompt[kept]
    assert output.usage.prompt_tokens == len(rest)
    assert output.token_ids == stack.executor.expected(rest, len(output.token_ids))
    assert len(output.token_ids) == (max_tokens or 1)


async def test_cache_breakpoints_move_with_a_truncated_prompt(stack: Stack) -> None:
    asked = pb.StreamGenerateRequest(max_tokens=1, prompt_truncation=pb.PromptTruncation(max_tokens=30))
    said = asked.chat.messages.add(role="user", content="the cat sat on the mat and the dog " * 3)
    said.cache_breakpoints.add(content_end=3, retention_priority=50)
    said.cache_breakpoints.add(content_end=len(said.content), retention_priority=60)
    [output] = await run(stack, asked)
    assert output.usage.prompt_tokens == 30
    [admission] = stack.manager.admissions
    # The first breakpoint is before the tokens that stay.
    [kept] = admission.retention.ranges
    assert (kept.start, kept.retention_priority) == (0, 60)
    assert 0 < kept.end < 30


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_have_token_ids_where_they_are_asked_for(stack: Stack, address: str, stream: bool) -> None:
    prompts = [prompt_of(5), prompt_of(9, seed=2)]
    body = LEAST | {"prompt": prompts, "n": 2, "max_tokens": 6, "stream": stream, "return_token_ids": True}
    answer = await ask(address, "POST", "/v1/completions", json.dumps(body))
    assert answer.status == 200
    prompt_ids: dict[int, list[int]] = {}
    token_ids: dict[int, list[int]] = {}
    for choice in (choice for event in events_of(answer.body, stream=stream) for choice in event["choices"]):
        if "prompt_token_ids" in choice:
            assert choice["index"] not in prompt_ids
            assert choice["index"] not in token_ids
            prompt_ids[choice["index"]] = choice["prompt_token_ids"]
        token_ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [prompt_ids[index] for index in range(4)] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    assert [token_ids[index] for index in (0, 2)] == [stack.executor.expected(prompt, 6) for prompt in prompts]
    assert {len(ids) for ids in token_ids.values()} == {6}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [False, True])
async def test_conversations_have_the_prompts_ids_once(stack: Stack, address: str, stream: bool, asked: bool) -> None:
    body = {"messages": [HELLO], "temperature": 0, "max_tokens": 6, "stream": stream, "return_token_ids": asked}
    answer = await ask(address, "POST", "/v1/chat/completions", json.dumps(body))
    events = events_of(answer.body, stream=stream)
    if not asked:
        assert "token_ids" not in answer.body
        return
    rendered = json.loads((await ask(address, "POST", "/tokenize", json.dumps({"messages": [HELLO]}))).body)["tokens"]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [rendered]
    assert events[0]["prompt_token_ids"] == rendered
    ids = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert ids == stack.executor.expected(rendered, 6)


def events_of(body: str, *, stream: bool) -> list[dict[str, Any]]:
    """An answer, or the events of a stream."""
    if not stream:
        return [json.loads(body)]
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def test_a_final_message_is_continued(stack: Stack, address: str) -> None:
    said = [HELLO, {"role": "assistant", "content": "The capital of"}]

    async def tokens(**how: Any) -> str:
        answer = await ask(address, "POST", "/tokenize", json.dumps({"messages": said, **how}))
        assert answer.status == 200, answer.body
        return stack.executor.tokenizer.decode(json.loads(answer.body)["tokens"], skip_special_tokens=False)

    begun = "<user>hello<eos>\n<assistant>The capital of"
    assert await tokens(continue_final_message=True) == begun
    assert await tokens(continue_final_message=True, add_generation_prompt=False) == begun
    assert await tokens(add_generation_prompt=False) == f"{begun}<eos>\n"
    assert await tokens() == f"{begun}<eos>\n<assistant>"
    body = {"messages": said, "continue_final_message": True, "max_tokens": 4, "temperature": 0}
    await ask(address, "POST", "/v1/chat/completions", json.dumps(body))
    assert stack.executor.tokenizer.decode(stack.manager.admissions[-1].token_ids, skip_special_tokens=False) == begun


async def test_special_tokens_can_be_left_out_of_tokens_and_texts(address: str) -> None:
    for field, text in (({}, "<eos>"), ({"skip_special_tokens": False}, "<eos>"), ({"skip_special_tokens": True}, "")):
        answer = await ask(address, "POST", "/detokenize", json.dumps({"tokens": [EOS]} | field))
        assert json.loads(answer.body) == {"prompt": text}
    counts = []
    for special in (True, False):
        body = json.dumps({"prompt": "the cat", "add_special_tokens": special})
        counts.append(json.loads((await ask(address, "POST", "/tokenize", body)).body)["count"])
    # This tokenizer adds none.
    assert counts[0] == counts[1] > 0


def test_of_alternatives_with_one_text_the_likeliest_counts() -> None:
    executor = FakeExecutor()
    # First bytes of two characters.
    likely, other = (executor.tokenizer.token_to_id(byte) for byte in "ÃÂ")
    model = ModelInfo(executor.model, execution_pb2.GetExecutorResponse(block_size=executor.block_size))
    top = [pb.TokenLogprob(token_id=likely, logprob=-1), pb.TokenLogprob(token_id=other, logprob=-2)]
    piece = pb.StreamGenerateResponse(token_ids=[likely], logprobs=[pb.TokenLogprobs(logprob=-1, top=top)])
    builder = CompletionResponseBuilder(model, "cmpl-1", logprobs=True, include_usage=False)
    assert builder.tokens(piece, 0)["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -1}]


@pytest.mark.parametrize("n", [1, 2])
async def test_each_prompt_of_a_call_has_its_receipts(stack: Stack, caller: openai.AsyncOpenAI, n: int) -> None:
    prompts = [prompt_of(9), prompt_of(21, seed=2)]
    answer = await caller.completions.create(
        model="fake", prompt=prompts, max_tokens=3, n=n, extra_body={"retention": {"ranges": [{"priority": 70}]}}
    )
    assert answer.model_extra is not None
    assert [receipt["num_blocks"] for receipt in answer.model_extra["retention"]] == [3, 6]
