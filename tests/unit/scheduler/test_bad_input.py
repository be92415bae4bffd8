"""Every wrong request gets a status that names its field, and changes nothing."""

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.generate import summary
from tests.support.generation import generate
from tests.support.scheduler.stack import Stack, refusal

Range = common.RetentionRange


def sampling(**fields: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(text="x", sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]


def cache(**fields: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(text="x", cache=pb.CacheOptions(**fields))  # type: ignore[arg-type]


def ids(*token_ids: int, **fields: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=token_ids), **fields)  # type: ignore[arg-type]


def chat(*messages: tuple[str, str]) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
    )


def spoken(**fields: str) -> pb.StreamGenerateRequest:
    """With what the model's template does not read."""
    message = pb.ChatMessage(role="assistant", content="4", **fields)  # type: ignore[arg-type]
    return pb.StreamGenerateRequest(chat=pb.ChatInput(messages=[message]))


def kept(*places: tuple[int, int], seconds: int = 1, **fields: object) -> pb.StreamGenerateRequest:
    """Three characters with cache breakpoints: where, and with what priority."""
    request = pb.StreamGenerateRequest(**fields)  # type: ignore[arg-type]
    said = request.chat.messages.add(role="user", content="cat")
    for end, priority in places:
        said.cache_breakpoints.add(
            content_end=end, retention_priority=priority, retention_duration=Duration(seconds=seconds)
        )
    return request


def hinted(*actions: common.HintAction, version: str = "0.1") -> pb.StreamGenerateRequest:
    return cache(kv_hints=common.KvHints(protocol_version=version, actions=actions))


ACTION = common.HintAction(action_id="a", action_type="Share", action_version="0.1")
BAD = {
    "input": pb.StreamGenerateRequest(),
    "text": pb.StreamGenerateRequest(text=""),
    "text ": pb.StreamGenerateRequest(text="x" * 3000),
    "text  ": pb.StreamGenerateRequest(text="x" * 10_000_000),
    "chat.messages": chat(),
    "chat.messages ": chat(("tool", "x")),
    "chat.messages   ": chat(*[("user", "x")] * 4097),
    "chat.messages[1].role": chat(("user", "x"), ("", "y")),
    "chat.messages[0].name": spoken(name="al"),
    "chat.messages[0].reasoning": spoken(reasoning="2+2"),
    "chat.messages[0].cache_breakpoints[1].content_end": kept((1, 5), (4, 5)),
    "chat.messages[0].cache_breakpoints[0].retention_priority": kept((1, 101)),
    "chat.messages[0].cache_breakpoints[0].retention_duration": kept((1, 5), seconds=-1),
    "chat.messages  ": kept(*[(1, 5)] * 5),
    "cache.retention_ranges ": kept((1, 5), cache=pb.CacheOptions(retention_ranges=[Range(retention_priority=1)])),
    "token_ids.token_ids": ids(),
    "token_ids.token_ids ": ids(*[1] * 400),
    "token_ids.token_ids[1]": ids(1, 1_000_000),
    "n": ids(1, n=0),
    "n ": ids(1, n=65),
    "max_tokens": ids(1, max_tokens=0),
    "max_tokens ": ids(1, max_tokens=400),
    "request_id": ids(1, request_id="é" * 65),
    "stop[1]": ids(1, stop=["x", ""]),
    "stop": ids(1, stop=["x"] * 17),
    "stop_token_ids[0]": ids(1, stop_token_ids=[1_000_000]),
    "sampling.temperature": sampling(temperature=-1),
    "sampling.temperature ": sampling(temperature=float("nan")),
    "sampling.temperature  ": sampling(temperature=101),
    "sampling.top_p": sampling(top_p=2),
    "sampling.top_p ": sampling(top_p=0),
    "sampling.min_p": sampling(min_p=1),
    "sampling.repetition_penalty": sampling(repetition_penalty=0),
    "sampling.presence_penalty": sampling(presence_penalty=3),
    "sampling.frequency_penalty": sampling(frequency_penalty=float("nan")),
    "sampling.num_logprobs": sampling(num_logprobs=21),
    "cache.salt": cache(salt=""),
    "cache.session_id": cache(session_id="s" * 257),
    "cache.onload_timeout": cache(onload_timeout=Duration()),
    "cache.onload_timeout ": cache(onload_timeout=Duration(seconds=-1)),
    "cache.kv_hints ": cache(kv_hints=common.KvHints(message_id="x" * 66_000)),
    "cache.decode_retention_duration": cache(decode_retention_duration=Duration(seconds=1)),
    "cache.retention_ranges[0].retention_duration": cache(
        retention_ranges=[Range(retention_priority=1, retention_duration=Duration())]
    ),
    "cache.decode_retention_priority": cache(decode_retention_priority=101),
    "cache.retention_ranges[0].retention_priority": cache(retention_ranges=[Range(retention_priority=101)]),
    "cache.retention_ranges[0].end": cache(retention_ranges=[Range(start=5, end=5)]),
    "cache.retention_ranges[0].start": cache(retention_ranges=[Range(start=3, end=9), Range(start=0, end=4)]),
    # The cache manager checks these.
    "cache.kv_hints.protocol_version": hinted(ACTION, version="7"),
    "cache.kv_hints.actions": hinted(),
    "cache.kv_hints.actions[1].action_id": hinted(ACTION, common.HintAction()),
    "cache.retention_ranges[1].start": cache(retention_ranges=[Range(start=0), Range(start=7, end=9)]),
}


async def test_every_wrong_field_is_named_and_nothing_changes(stack: Stack) -> None:
    for field, message in BAD.items():
        error = await refusal(generate(stack.stub, message, 30))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT, field
        assert list(error.fields) == [field.strip()]
    assert stack.manager.admitted_ids == []
    assert (await stack.stub.GetLoads(pb.GetLoadsRequest())).waiting_requests == 0
    error = await refusal(generate(stack.stub, ids(1, model="other"), 30))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.NOT_FOUND, ["model"])


async def test_the_error_of_a_long_prompt_names_the_bound(stack: Stack) -> None:
    for said, asked in {
        "has 400 tokens; at most 399 fit": ids(*[1] * 400),
        "is more than fits behind 390 prompt tokens, which is 10": ids(*[1] * 390, max_tokens=11),
    }.items():
        error = await refusal(generate(stack.stub, asked, 30))
        assert (error.reason, said in error.message) == ("CONTEXT_LENGTH_EXCEEDED", True)


async def test_an_invalid_request_is_not_tokenized(stack: Stack) -> None:
    for field in ("input", "text", "text  ", "chat.messages", "chat.messages ", "chat.messages[1].role"):
        request = pb.TokenizePromptRequest()
        match BAD[field].WhichOneof("input"):
            case "text":
                request.text = BAD[field].text
            case "chat":
                request.chat.CopyFrom(BAD[field].chat)
        error = await refusal(stack.stub.TokenizePrompt(request, timeout=5))
        assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, [field.strip()])
    # Whether it fits is what callers count tokens for.
    long = await stack.stub.TokenizePrompt(pb.TokenizePromptRequest(text=BAD["text "].text), timeout=5)
    assert len(long.token_ids) > 400


async def test_an_impossible_rule_fails_only_its_own_requests(stack: Stack) -> None:
    stack.manager.rule("ruled", common.EvictionPolicy(kind="EVICTION_KIND_SUM", recent_tokens=3))
    with pytest.raises(grpc.aio.AioRpcError, match=r"rule ruled.*recent_tokens") as caught:
        await generate(stack.stub, ids(1, 2, max_tokens=2, cache=pb.CacheOptions(salt="ruled")), 30)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await generate(stack.stub, ids(1, 2, max_tokens=2), 30)).token_ids
    assert len({one.scheduler_epoch for one in stack.manager.admissions}) == 1


async def test_a_request_that_never_fits_is_refused(stack: Stack) -> None:
    # 100 blocks of 4: a whole prompt and the table that it moves to do not fit in beside each other.
    policy = common.EvictionPolicy(kind="EVICTION_KIND_KEYDIFF", max_cache_tokens=300)  # type: ignore[arg-type]
    error = await refusal(generate(stack.stub, ids(*[1] * 390, max_tokens=2, eviction_policy=policy), 30))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["eviction_policy"])
    assert "100" in error.message
    # An operator has made the pool smaller since the model was described.
    stack.manager.shrink(10)
    error = await refusal(generate(stack.stub, ids(*[1] * 60, max_tokens=2), 30))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["input"])
    assert "do not fit into 10 blocks" in error.message


async def test_a_rules_policy_that_needs_more_blocks_than_there_are_is_an_operators(stack: Stack) -> None:
    stack.manager.rule("ruled", common.EvictionPolicy(kind="EVICTION_KIND_KEYDIFF", max_cache_tokens=300))
    request = ids(*[1] * 390, max_tokens=2, cache=pb.CacheOptions(salt="ruled"))
    error = await refusal(generate(stack.stub, request, 30))
    assert (error.code, error.reason, error.fields) == (grpc.StatusCode.FAILED_PRECONDITION, "RULE_POLICY", {})
    assert "blocks at once" in error.message


async def test_a_call_without_deadline_is_served(stack: Stack) -> None:
    parts = [part async for part in stack.stub.StreamGenerate(ids(1, max_tokens=2, ignore_eos=True))]
    assert sum(len(part.token_ids) for part in parts) == 2


async def test_the_model_is_described(stack: Stack) -> None:
    model = await stack.stub.GetModel(pb.GetModelRequest())
    assert (model.model, model.max_model_tokens, model.dtype) == ("fake", 400, "float32")


async def say_the_cat(stack: Stack, *options: str) -> tuple[str, str]:
    """What the command line client prints, and what it says beside."""
    command = (sys.executable, "-m", "scheduler.generate", "the cat", "--raw", "--address", stack.address, *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = (text.decode() for text in await process.communicate())
    assert process.returncode == 0, err
    return out, err


async def test_the_command_line_client_streams_and_sums_up(stack: Stack) -> None:
    out, err = await say_the_cat(stack, "--max-tokens", "5", "--seed", "0")
    assert out.strip()
    assert "output 5 tokens" in err


async def test_the_command_line_client_shows_each_sample_whole(stack: Stack) -> None:
    out, err = await say_the_cat(stack, "--max-tokens", "30", "--n", "3")
    parts = [part.partition("\n") for part in out.split("--- ")[1:]]
    assert {heading for heading, _, _ in parts} == {"1 of 3", "2 of 3", "3 of 3"}
    [answer] = {text for _, _, text in parts}
    assert answer.strip()
    assert "prompt 2 " in err
    assert "output 90 tokens" in err


def test_the_client_reports_a_missing_server_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scheduler.generate", "x", "--address", "unix:/nowhere"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "make run-stack" in done.stderr


def test_the_command_line_client_says_where_cached_tokens_were() -> None:
    usage = pb.Usage(prompt_tokens=37, cached_tokens=36, output_tokens=8)
    assert summary(usage, 0.0, 0.05, 1.0).startswith("cached 36 · prompt 37 · output 8 tokens · TTFT 50 ms")
    usage.host_tokens, usage.disk_tokens = 16, 4
    assert summary(usage, 0.0, 0.05, 1.0).startswith("cached 36 (16 from host memory, 4 from disk) · prompt 37")
