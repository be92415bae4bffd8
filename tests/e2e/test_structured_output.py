"""Structured output on the real stack: what clients get, and that no death of a process changes its form."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Literal

import grpc
import openai
import pydantic
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack
from tests.support.generation import Output, generate, generate_all, generate_samples
from tests.support.idle import until_idle
from tests.support.patience import patience

pytestmark = pytest.mark.model

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
WORDS = "([a-z]{2,6} ){20,30}(end|stop)"


class Capital(pydantic.BaseModel):
    """An answer."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: str = pydantic.Field(max_length=20)
    country: Literal["France", "Spain"]
    inhabitants: int = pydantic.Field(ge=0, le=100_000_000)
    rivers: list[str] = pydantic.Field(max_length=2)


async def test_openais_client_parses_a_model(client: openai.AsyncOpenAI) -> None:
    for seed in range(4):
        answer = await client.chat.completions.parse(
            model="", messages=CAPITAL, response_format=Capital, temperature=0.9, seed=seed, max_tokens=400
        )  # fmt: skip
        [choice] = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Capital)


async def test_a_stream_has_the_same_json(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="", messages=CAPITAL, response_format=Capital, temperature=0, max_tokens=400
    ) as stream:
        events = [event async for event in stream]
        streamed = (await stream.get_final_completion()).choices[0].message
    whole = await client.chat.completions.create(
        model="", messages=CAPITAL, temperature=0, max_tokens=400,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": Capital.model_json_schema()}},
    )  # fmt: skip
    assert streamed.content == whole.choices[0].message.content
    assert Capital.model_validate_json(streamed.content or "") == streamed.parsed
    assert len(events) > 5


async def test_any_json_object_and_vllms_forms(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="", messages=CAPITAL, temperature=0, max_tokens=400, response_format={"type": "json_object"}
    )  # fmt: skip
    text = answer.choices[0].message.content or ""
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)
    forms = ({"choice": ["Paris", "Rome"]}, {"regex": "P[a-z]{4}"}, {"grammar": 'root ::= "Paris" | "Rome"'})
    for form in forms:
        answer = await client.chat.completions.create(
            model="", messages=CAPITAL, temperature=0, extra_body={"structured_outputs": form}
        )  # fmt: skip
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Paris", "stop")


def formed(seed: int, **fields: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=range(2000 + 40 * seed, 2030 + 40 * seed)),
        max_tokens=220,
        sampling=pb.SamplingParams(temperature=0.8, seed=seed),
        structured_output=common.StructuredOutput(regex=WORDS),
        **fields,  # type: ignore[arg-type]
    )


def ends_well(output: Output) -> bool:
    return output.finish_reason == pb.FINISH_REASON_STOP and bool(re.fullmatch(WORDS, output.text))


@pytest.fixture(scope="module", params=["", "with drafts"])
def small(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A pool that a few requests do not fit into."""
    drafts = {"executor_max_drafts": 10} if request.param else {}
    with Stack(executor_max_tokens=256, executor_batch_invariant=1, **drafts) as stack:
        yield stack


async def test_samples_preemptions_and_ignored_ends_keep_the_form(small: Stack) -> None:
    requests = [formed(seed, ignore_eos=seed % 2 == 0) for seed in range(7)]
    outputs = await generate_all(small.scheduler, requests, concurrency=7, seconds=patience(60))
    assert all(map(ends_well, outputs))
    assert sum(output.usage.preemptions for output in outputs)
    alone = [
        (await generate_all(small.scheduler, [request], concurrency=1, seconds=patience(60)))[0] for request in requests
    ]
    assert [output.token_ids for output in alone] == [output.token_ids for output in outputs]
    async with grpc.aio.insecure_channel(small.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        assert all(map(ends_well, await generate_samples(stub, formed(9, n=3), patience(60))))
    assert not (await until_idle(small.admin)).violations


@pytest.mark.parametrize("process", ["executor", "cachemgr"])
async def test_the_death_of_a_process_keeps_the_form(small: Stack, process: str) -> None:
    [expected] = await generate_all(small.scheduler, [formed(11)], concurrency=1, seconds=patience(60))
    async with grpc.aio.insecure_channel(small.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        begun = asyncio.Event()
        output = asyncio.create_task(generate(stub, formed(11), patience(60), begun))
        await begun.wait()
        small.kill(process)
        small.start(process)
        await asyncio.to_thread(small.wait_until_serving, process)
        assert (await output).token_ids == expected.token_ids
    assert ends_well(expected)
