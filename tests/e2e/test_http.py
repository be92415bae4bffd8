"""OpenAI's API on the real stack, through OpenAI's own client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.channel import open_channel
from tests.stack import Stack
from tests.support.idle import until_idle
from tests.support.patience import patience

pytestmark = pytest.mark.model

SAMPLES_THAT_FILL_THE_QUEUE = 16
LONG = list(range(5000, 5064))
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
# What follows a system message: its end, a line break, and the beginning of the answer.
CLOSING_TOKENS = 5
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


async def test_a_conversation_is_answered(client: openai.AsyncOpenAI) -> None:
    model, by_hub_id = (await client.models.list()).data
    assert (model.id, by_hub_id.id) == ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")
    for name in (model.id, by_hub_id.id):
        assert (await client.models.retrieve(name)).id == name
    answer = await client.chat.completions.create(model=model.id, messages=CAPITAL, temperature=0, seed=1)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == 8
    assert answer.model == model.id
    assert answer.id.startswith("chatcmpl-")


async def test_a_stream_says_the_same_and_ends_with_its_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="", messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == "The capital of France is Paris."
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert len(pieces) > 3
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert last.usage.prompt_tokens_details is not None


async def test_a_second_turn_hits_the_prefix_of_the_first(client: openai.AsyncOpenAI) -> None:
    prompt = list(range(2000, 2064))

    async def cached(**extra: object) -> int:
        answer = await client.completions.create(model="", prompt=prompt, max_tokens=1, extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 64
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached() == 0
    assert await cached() >= 48
    # A request with another salt has no hit.
    assert await cached(cache_salt="other") == 0
    assert await cached(cache_salt="other") >= 48


async def test_samples_repeat_with_their_seed(client: openai.AsyncOpenAI) -> None:
    async def run() -> list[str]:
        answer = await client.completions.create(
            model="", prompt="Once upon a time", n=3, temperature=1.5, seed=7, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
        return [choice.text for choice in answer.choices]

    first = await run()
    assert len(set(first)) == 3
    assert await run() == first


async def test_each_sample_of_a_stream_is_whole(client: openai.AsyncOpenAI) -> None:
    def request(stream: bool) -> dict[str, object]:
        return {
            "model": "",
            "messages": CAPITAL,
            "n": 2,
            "temperature": 0.7,
            "seed": 3,
            "max_tokens": 12,
            "stream": stream,
        }

    whole = await client.chat.completions.create(**request(False))
    texts, ends = ["", ""], [None, None]
    async for chunk in await client.chat.completions.create(**request(True)):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content
        ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    # Both share the prompt, which counts once.
    assert whole.usage.prompt_tokens == 37
    assert ends == [choice.finish_reason for choice in whole.choices]


async def test_a_stop_text_ends_the_output_and_is_not_part_of_it(client: openai.AsyncOpenAI) -> None:
    for stop in (" France", [" nowhere", " France"]):
        answer = await client.chat.completions.create(model="", messages=CAPITAL, temperature=0, stop=stop)
        assert answer.choices[0].message.content == "The capital of"
        assert answer.choices[0].finish_reason == "stop"
    short = await client.chat.completions.create(model="", messages=CAPITAL, temperature=0, max_completion_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("The capital", "length")


async def test_log_probabilities_are_those_of_the_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="", messages=CAPITAL, temperature=0, logprobs=True, top_logprobs=3, max_tokens=4
    )  # fmt: skip
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None
    assert [token.token for token in tokens] == ["The", " capital", " of", " France"]
    for token in tokens:
        assert bytes(token.bytes or []).decode() == token.token
        likely = [top.logprob for top in token.top_logprobs]
        assert likely == sorted(likely, reverse=True)
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 3
        assert -5 < token.logprob <= 0
    plain = await client.completions.create(model="", prompt="The capital of France is", temperature=0, logprobs=2)
    told = plain.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert plain.choices[0].text.startswith("".join(told.tokens)[:20])
    assert told.text_offset is not None
    assert told.text_offset[:2] == [0, len(told.tokens[0])]
    assert len(told.top_logprobs or []) == len(told.token_logprobs or []) == len(told.tokens) == 16
    parts = [
        part async for part in await client.completions.create(
            model="", prompt="The capital of France is", temperature=0, logprobs=2, stream=True
        )
    ]  # fmt: skip
    streamed = [part.choices[0].logprobs for part in parts]
    assert [token for one in streamed if one for token in one.tokens or []] == told.tokens
    assert [offset for one in streamed if one for offset in one.text_offset or []] == told.text_offset


async def test_ids_go_to_text_and_back(client: openai.AsyncOpenAI, api: Stack) -> None:
    root = str(client.base_url).removesuffix("/v1/")
    found = await client.post(f"{root}/tokenize", cast_to=dict, body={"prompt": "The capital of France"})
    assert found["count"] == len(found["tokens"]) == 4
    back = await client.post(f"{root}/detokenize", cast_to=dict, body={"tokens": found["tokens"]})
    assert back == {"prompt": "The capital of France"}
    chat = await client.post(f"{root}/tokenize", cast_to=dict, body={"messages": CAPITAL})
    answer = await client.completions.create(model="", prompt=chat["tokens"], temperature=0, max_tokens=7)
    assert answer.choices[0].text == "The capital of France is Paris."
    version = await client.get(f"{root}/version", cast_to=dict)
    assert list(version) == ["version"]
    metrics = await client.get(f"{root}/metrics", cast_to=str)
    assert "kvkeep_scheduler_output_tokens_total" in metrics
    assert await client.get(f"{root}/health", cast_to=str) == ""


async def test_retention_requests_get_receipts(client: openai.AsyncOpenAI) -> None:
    prompt = list(range(3000, 3064))
    extra = {
        "session_id": "s",
        "retention": {
            "ranges": [{"start": 0, "end": 32, "priority": 80, "duration": "5m"}],
            "decode": {"priority": 20},
        },
        "eviction_policy": {
            "kind": "sliding_window",
            "start_tokens": 16,
            "recent_tokens": 16,
            "period_tokens": 16,
            "positions": "compacted",
        },
        "kv_hints": {
            "message_id": "m",
            "actions": [
                {"action_id": "keep", "action_type": "Retain", "payload": {"priority": 60}},
                {"action_id": "what", "action_type": "Juggle"},
            ],
        },
    }
    answer = await client.completions.create(model="", prompt=prompt, max_tokens=20, extra_body=extra)
    told = answer.model_dump()
    granted = {receipt["request"]: receipt for receipt in told["retention"]}
    assert granted["ranges[0]"] | {"reason": ""} == {
        "request": "ranges[0]", "outcome": "granted", "reason": "", "priority": 80, "duration": 300.0, "num_blocks": 2,
    }  # fmt: skip
    # What a session keeps without an end ends a day after its last request.
    assert (granted["decode"]["outcome"], granted["decode"]["duration"]) == ("clipped", 86_400.0)
    hints = {hint["action_id"]: hint["outcome"] for hint in told["kv_hints"]["actions"]}
    assert hints == {"keep": "deferred", "what": "rejected"}
    eviction = told["choices"][0]["eviction"]
    assert eviction["policy"]["kind"] == "sliding_window"
    assert eviction["policy"]["positions"] == "compacted"
    assert eviction["evicted_tokens"] > 0
    stream = await client.completions.create(model="", prompt=prompt, max_tokens=20, stream=True, extra_body=extra)
    last = [chunk async for chunk in stream][-1].model_dump()
    assert last["kv_hints"]["actions"][0]["outcome"] == "clipped"
    assert last["choices"][0]["eviction"]["evicted_tokens"] > 0


async def test_a_part_of_a_conversation_is_kept_for_a_while(client: openai.AsyncOpenAI, api: Stack) -> None:
    text = "You are the clerk of a small library. " * 8
    system = {"role": "system", "content": [{"type": "text", "text": text, "cache_control": EPHEMERAL}]}
    tokens = await client.post(f"http://{api.http}/tokenize", cast_to=dict, body={"messages": [system]})
    answer = await client.chat.completions.create(
        model="", messages=[system, *CAPITAL], max_tokens=1, prompt_cache_key="library"
    )
    [receipt] = answer.model_dump()["retention"]
    assert (receipt["request"], receipt["outcome"], receipt["priority"], receipt["duration"]) == (
        "ranges[0]",
        "granted",
        80,
        3600,
    )
    assert receipt["num_blocks"] == -(-(tokens["count"] - CLOSING_TOKENS) // 16)
    kept = await client.completions.create(
        model="", prompt=list(range(6000, 6040)), max_tokens=1, extra_body={"prompt_cache_retention": "24h"}
    )
    told = {
        receipt["request"]: (receipt["priority"], receipt["duration"]) for receipt in kept.model_dump()["retention"]
    }
    assert told == {"ranges[0]": (80, 86_400), "decode": (80, 86_400)}


async def refused(call: object) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    assert caught.value.response.headers["x-request-id"]
    return caught.value


async def test_errors_are_openais_and_name_the_field(client: openai.AsyncOpenAI) -> None:
    create = client.chat.completions.create
    wrong: list[tuple[str, dict[str, object]]] = [
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "warm"}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("n", {"max_tokens": 0, "n": 2}),
        ("max_completion_tokens", {"max_completion_tokens": 1_000_000}),
        ("messages[0].role", {"messages": [{"role": "", "content": "x"}]}),
        ("messages[0].content[1].type", {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("messages", {"messages": []}),
        ("messages[0].cache_contrl", {"messages": [{"role": "user", "content": "x", "cache_contrl": EPHEMERAL}]}),
        ("cache_control", {"extra_body": {"cache_control": EPHEMERAL}}),
        ("prompt_cache_retention", {"messages": [{"role": "user", "content": "x", "cache_control": EPHEMERAL}],
            "extra_body": {"prompt_cache_retention": "1h"}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.schema", {"response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}}),
        ("structured_outputs.regex", {"extra_body": {"structured_outputs": {"regex": "(a"}}}),
        ("logit_bias.5", {"logit_bias": {"5": 101}}),
        ("cache_slat", {"extra_body": {"cache_slat": "x"}}),
        ("cache_salt", {"extra_body": {"cache_salt": ""}}),
        ("prompt_cache_key", {"prompt_cache_key": "k" * 257}),
        ("retention.ranges[0].priority", {"extra_body": {"retention": {"ranges": [{"priority": 101}]}}}),
        ("retention.ranges[0].prio", {"extra_body": {"retention": {"ranges": [{"priority": 1, "prio": 1}]}}}),
        ("eviction_policy.kind", {"extra_body": {"eviction_policy": {"kind": "best"}}}),
        ("eviction_policy.recent_tokens", {"extra_body": {"eviction_policy": {"kind": "sum", "recent_tokens": 3}}}),
        ("kv_hints.protocol_version", {"extra_body": {"kv_hints": {"protocol_version": "7", "actions": [
            {"action_id": "a", "action_type": "Retain"}]}}}),
    ]  # fmt: skip
    for stream in (False, True):
        for param, fields in wrong:
            error = await refused(create(**{"model": "", "messages": CAPITAL, "stream": stream} | fields))
            assert isinstance(error, openai.BadRequestError), param
            assert (error.param, error.type) == (param, "invalid_request_error")
            assert param in error.message
    error = await refused(create(model="gpt-4", messages=CAPITAL))
    assert isinstance(error, openai.NotFoundError)
    assert (error.param, error.code) == ("model", "model_not_found")
    assert (await refused(client.models.retrieve("gpt-4"))).status_code == 404
    assert (await refused(client.embeddings.create(model="", input="x"))).code == "not_found"


async def test_a_full_queue_says_when_to_retry(client: openai.AsyncOpenAI, api: Stack) -> None:
    prompt = list(range(4000, 4032))
    stream = await client.completions.create(
        model="", prompt=prompt, n=SAMPLES_THAT_FILL_THE_QUEUE, max_tokens=4000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    async with stream:
        await anext(aiter(stream))
        error = await refused(client.completions.create(model="", prompt="x"))
        assert isinstance(error, openai.RateLimitError)
        assert error.code == "queue_full"
        assert int(error.response.headers["retry-after"]) >= 1
    report = await until_idle(api.admin)
    assert not report.violations


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_frees_the_blocks(client: openai.AsyncOpenAI, api: Stack, stream: bool) -> None:
    async with open_channel(api.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)

        async def running(wanted: int) -> None:
            async with asyncio.timeout(patience(30)):
                while (await stub.GetLoads(pb.GetLoadsRequest(), timeout=patience(5))).running_requests != wanted:
                    await asyncio.sleep(0.02)

        call = asyncio.create_task(
            client.completions.create(
                model="",
                prompt=list(range(5000, 5064)),
                max_tokens=3500,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
        )
        await running(1)
        if stream:
            await (await call).close()
        else:
            call.cancel()
            await asyncio.wait({call})
        await running(0)
    report = await until_idle(api.admin)
    assert not report.violations
    assert [pool.used_blocks for pool in report.pools] == [0]
