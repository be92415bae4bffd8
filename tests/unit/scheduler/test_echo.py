"""Prompts in answers: their text, and the log-probabilities of their tokens, in OpenAI's shape and in vLLM's."""

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.openai import responses
from tests.support.patience import patience
from tests.support.scheduler.http import HELLO, ask, client, serve
from tests.support.scheduler.stack import Stack

PROMPTS = ["the cat sat", "on the mat"]


async def complete(stack: Stack, **fields: Any) -> Any:
    async with serve(stack.scheduler.service) as address, client(address) as caller:
        return await caller.completions.create(**{"model": "fake", "max_tokens": 3, "temperature": 0} | fields)


async def test_texts_begin_with_their_prompts(stack: Stack) -> None:
    plain = await complete(stack, prompt=PROMPTS, n=2)
    echoed = await complete(stack, prompt=PROMPTS, n=2, echo=True)
    texts = [choice.text for choice in plain.choices]
    assert [choice.text for choice in echoed.choices] == [PROMPTS[i // 2] + text for i, text in enumerate(texts)]
    assert echoed.usage.completion_tokens == 12
    ids = stack.executor.tokenizer.encode(PROMPTS[0]).ids
    [choice] = (await complete(stack, prompt=ids, echo=True)).choices
    assert choice.text == echoed.choices[0].text


@pytest.mark.parametrize("logprobs", [0, 2])
async def test_log_probabilities_begin_with_those_of_the_prompt(stack: Stack, logprobs: int) -> None:
    answer = await complete(stack, prompt=PROMPTS, n=2, echo=True, logprobs=logprobs)
    for index, choice in enumerate(answer.choices):
        ids = stack.executor.tokenizer.encode(PROMPTS[index // 2]).ids
        scores = choice.logprobs
        assert "".join(scores.tokens) == choice.text
        assert scores.token_logprobs == [None, *(-float(token) for token in ids[1:]), -0.5, -0.5, -0.5]
        assert list(scores.text_offset) == [sum(map(len, scores.tokens[:count])) for count in range(len(scores.tokens))]
        assert [top if top is None else len(top) for top in scores.top_logprobs] == [
            None, *[logprobs] * (len(scores.tokens) - 1)
        ]  # fmt: skip
    # What is cached has no log-probabilities.
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_of_a_prompt_that_is_cut_only_what_is_kept_is_repeated(stack: Stack) -> None:
    cut = {"truncate_prompt_tokens": 3}
    [choice] = (await complete(stack, prompt=PROMPTS[0], echo=True, logprobs=0, extra_body=cut)).choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.tokens) == 6


@pytest.mark.parametrize("path", ["echo", "prompt_logprobs"])
async def test_an_aborted_request_has_what_is_known_of_its_prompt(stack: Stack, path: str) -> None:
    stack.executor.gate.clear()
    body = {"request_id": "mine"} | ({"prompt_logprobs": 0} if path == "prompt_logprobs" else {})
    more = {"echo": True, "logprobs": 0} if path == "echo" else {}
    running = asyncio.create_task(complete(stack, prompt=PROMPTS[0], extra_body=body, **more))
    async with asyncio.timeout(patience(20)):
        while not stack.scheduler.requests.abort(pb.AbortRequestsRequest(request_id="mine")):
            await asyncio.sleep(0.01)
    [choice] = (await running).choices
    stack.executor.gate.set()
    ids = stack.executor.tokenizer.encode(PROMPTS[0]).ids
    assert choice.finish_reason == "abort"
    if path == "echo":
        assert choice.text == PROMPTS[0]
        assert choice.logprobs.token_logprobs == [None] * len(ids)
    else:
        assert choice.prompt_logprobs == [None] * len(ids)


async def test_a_stream_has_the_same(stack: Stack) -> None:
    whole = await complete(stack, prompt=PROMPTS[0], echo=True, logprobs=1, max_tokens=8)
    async with serve(stack.scheduler.service) as address, client(address) as caller:
        stream = await caller.completions.create(
            model="fake", prompt=PROMPTS[0], echo=True, logprobs=1, max_tokens=8, temperature=0, stream=True
        )  # fmt: skip
        choices = [choice async for chunk in stream for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        pieces = [value for choice in choices if choice.logprobs for value in getattr(choice.logprobs, name)]
        assert pieces == getattr(whole.choices[0].logprobs, name)


async def test_prompts_are_scored_in_vllms_shape(stack: Stack) -> None:
    ids = stack.executor.tokenizer.encode(PROMPTS[0]).ids
    [choice] = (await complete(stack, prompt=PROMPTS[0], extra_body={"prompt_logprobs": 1})).choices
    assert choice.text == (await complete(stack, prompt=PROMPTS[0])).choices[0].text
    first, *rest = choice.prompt_logprobs
    assert first is None
    for position, (token, scored) in enumerate(zip(ids[1:], rest, strict=True), 1):
        assert scored[str(token)] == {
            "logprob": -float(token), "rank": position, "decoded_token": stack.executor.tokenizer.decode([token])
        }  # fmt: skip
        assert set(scored) == {"0", str(token)}
    async with serve(stack.scheduler.service) as address, client(address) as caller:
        create = caller.chat.completions.create
        answer = await create(model="fake", messages=[HELLO], max_tokens=2, extra_body={"prompt_logprobs": 0})  # type: ignore[arg-type,list-item]
        assert len((answer.model_extra or {})["prompt_logprobs"]) == answer.usage.prompt_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [
        ("completions", responses.Completion, {"prompt": PROMPTS[0], "echo": True, "logprobs": 1}),
        ("completions", responses.Completion, {"prompt": PROMPTS, "prompt_logprobs": 1, "return_token_ids": True}),
        ("chat/completions", responses.ChatCompletion, {"messages": [HELLO], "prompt_logprobs": 0}),
        ("chat/completions", responses.ChatCompletion, {"messages": [HELLO], "logprobs": True, "top_logprobs": 1}),
    ],
)
async def test_the_description_of_an_answer_has_all_its_fields(
    stack: Stack, path: str, kind: type, fields: dict[str, Any]
) -> None:
    asked = json.dumps({"model": "fake", "max_tokens": 2} | fields)
    async with serve(stack.scheduler.service) as address:
        answer = json.loads((await ask(address, "POST", f"/v1/{path}", asked)).body)
    # Fields that the type does not have would be missing.
    assert TypeAdapter(kind).validate_python(answer) == answer


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_a_wrong_field_is_named(stack: Stack, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(stack, prompt="x", **fields)
    assert caught.value.param == param
