"""Every wrong request gets a status that names its field, and changes nothing."""

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.generate import summary
from tests.support.generation import generate
from tests.support.patience import patience
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
    """A message with fields that the model's template does not read."""
    message = pb.ChatMessage(role="assistant", content="4", **fields)  # type: ignore[arg-type]
    return pb.StreamGenerateRequest(chat=pb.ChatInput(messages=[message]))


def calling(*calls: pb.ToolCall, role: str = "assistant", **fields: str) -> pb.StreamGenerateRequest:
    """A conversation with a message that calls tools, or answers a call."""
    message = pb.ChatMessage(role=role, content="x", tool_calls=calls, **fields)  # type: ignore[arg-type]
    return pb.StreamGenerateRequest(chat=pb.ChatInput(messages=[message]))


def tool_call(call_id: str = "c", name: str = "f", arguments: str = "{}") -> pb.ToolCall:
    return pb.ToolCall(id=call_id, function=pb.FunctionCall(name=name, arguments=arguments))


def tooled(*tools: str, **fields: object) -> pb.StreamGenerateRequest:
    messages = [pb.ChatMessage(role="user", content="x")]
    return pb.StreamGenerateRequest(chat=pb.ChatInput(messages=messages, tools=tools, **fields))  # type: ignore[arg-type]


def rendered(**fields: object) -> pb.StreamGenerateRequest:
    """A conversation, and how to render it."""
    hello = pb.ChatMessage(role="user", content="hello")
    return pb.StreamGenerateRequest(chat=pb.ChatInput(messages=[hello], **fields))  # type: ignore[arg-type]


def arguments(**values: object) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


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


def formed(**form: object) -> pb.StreamGenerateRequest:
    """With a form of the output."""
    return pb.StreamGenerateRequest(text="x", structured_output=common.StructuredOutput(**form))  # type: ignore[arg-type]


def tagged(*triggers: str, begin: str = "<f>", schema: str = "{}") -> pb.StreamGenerateRequest:
    return structured(common.StructuralTag(begin=begin, json_schema=schema, end="</f>"), triggers=triggers)


def structured(*tags: common.StructuralTag, triggers: tuple[str, ...]) -> pb.StreamGenerateRequest:
    return formed(structural_tags=common.StructuralTags(tags=tags, triggers=triggers))


TOOL = '{"type": "function", "function": {"name": "f"}}'
ACTION = common.HintAction(action_id="a", action_type="Share", action_version="0.1")
BAD = {
    "input": pb.StreamGenerateRequest(),
    "text": pb.StreamGenerateRequest(text=""),
    "text ": pb.StreamGenerateRequest(text="x" * 3000),
    "text  ": pb.StreamGenerateRequest(text="x" * 10_000_000),
    "chat.messages": chat(),
    "chat.messages ": calling(role="tool", tool_call_id="c"),
    "chat.messages   ": chat(*[("user", "x")] * 4097),
    "chat.messages[1].role": chat(("user", "x"), ("", "y")),
    "chat.messages[0].name": spoken(name="al"),
    "chat.messages[0].reasoning": spoken(reasoning="2+2"),
    "chat.messages[0].tool_call_id": chat(("tool", "x")),
    "chat.messages[0].tool_call_id ": calling(role="tool", tool_call_id="c" * 257),
    "chat.messages[0].tool_call_id  ": calling(tool_call_id="c"),
    "chat.messages[0].tool_calls": calling(tool_call()),
    "chat.messages[0].tool_calls ": calling(tool_call(), role="user"),
    "chat.messages[0].tool_calls  ": calling(*[tool_call()] * 129),
    "chat.messages[0].tool_calls[1].id": calling(tool_call(), tool_call("")),
    "chat.messages[0].tool_calls[0].function.name": calling(tool_call(name="é")),
    "chat.messages[0].tool_calls[0].function.arguments": calling(tool_call(arguments="[]")),
    "chat.messages    ": calling(tool_call(arguments='{"a": [' + "0," * 300_000 + "0]}")),
    "chat.tools": tooled(TOOL),
    "chat.tools ": tooled(*[TOOL] * 129),
    "chat.tools  ": tooled(TOOL + " " * 300_000),
    "chat.tools[0]": tooled("[]"),
    "chat.tools[0] ": tooled("{"),
    "chat.tools[0].type": tooled("{}"),
    "chat.tools[0].function": tooled('{"type": "function", "function": 1}'),
    "chat.tools[1].function.name": tooled(TOOL, TOOL),
    "chat.tool_choice": tooled(tool_choice=pb.TOOL_CHOICE_REQUIRED),
    "chat.tool_choice ": tooled(TOOL, tool_choice=7),
    "chat.tool_name": tooled(TOOL, tool_choice=pb.TOOL_CHOICE_REQUIRED, tool_name="g"),
    "chat.tool_name ": tooled(TOOL, tool_name="f"),
    "chat.messages[0].cache_breakpoints[1].content_end": kept((1, 5), (4, 5)),
    "chat.messages[0].cache_breakpoints[0].retention_priority": kept((1, 101)),
    "chat.messages[0].cache_breakpoints[0].retention_duration": kept((1, 5), seconds=-1),
    "chat.messages  ": kept(*[(1, 5)] * 5),
    "cache.retention_ranges ": kept((1, 5), cache=pb.CacheOptions(retention_ranges=[Range(retention_priority=1)])),
    "chat.continue_final_message": rendered(continue_final_message=True, add_generation_prompt=True),
    "chat.template_arguments": rendered(template_arguments=arguments(x="y" * 66_000)),
    "chat.template_arguments ": rendered(template_arguments=arguments(x=[{"y": float("inf")}])),
    "chat.template_arguments.eos_token": rendered(template_arguments=arguments(eos_token="x")),
    "chat.template_arguments.messages": rendered(template_arguments=arguments(messages=[])),
    "prompt_truncation.max_tokens": ids(1, prompt_truncation=pb.PromptTruncation(max_tokens=0)),
    "token_ids.token_ids  ": ids(*[1] * 900, prompt_truncation=pb.PromptTruncation(max_tokens=400)),
    "max_tokens  ": ids(*[1] * 900, max_tokens=400, prompt_truncation=pb.PromptTruncation()),
    "token_ids.token_ids": ids(),
    "token_ids.token_ids ": ids(*[1] * 400),
    "token_ids.token_ids[1]": ids(1, 1_000_000),
    "n": ids(1, n=0),
    "n ": ids(1, n=65),
    "n  ": ids(1, n=2, max_tokens=0),
    "max_tokens": ids(1, max_tokens=400),
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
    "sampling.logit_bias.1000000": sampling(logit_bias={1_000_000: 1}),
    "sampling.logit_bias.5": sampling(logit_bias={5: 101}),
    "sampling.logit_bias.6": sampling(logit_bias={6: float("nan")}),
    "sampling.logit_bias": sampling(logit_bias=dict.fromkeys(range(1025), 1)),
    "sampling.min_tokens": ids(1, max_tokens=3, sampling=pb.SamplingParams(min_tokens=4)),
    "sampling.bad_words": sampling(bad_words=["x"] * 65),
    "sampling.bad_words[1]": sampling(bad_words=["x", " "]),
    "sampling.bad_words[0]": sampling(bad_words=["x" * 1025]),
    "sampling.bad_token_ids": sampling(bad_token_ids=[pb.TokenIds(token_ids=[1])] * 257),
    "sampling.bad_token_ids[1].token_ids": sampling(bad_token_ids=[pb.TokenIds(token_ids=[1]), pb.TokenIds()]),
    "sampling.bad_token_ids[0].token_ids[0]": sampling(bad_token_ids=[pb.TokenIds(token_ids=[1_000_000])]),
    "sampling.allowed_token_ids[1]": sampling(allowed_token_ids=[1, 1_000_000]),
    "sampling.num_prompt_logprobs": sampling(num_prompt_logprobs=21),
    "structured_output": formed(),
    "structured_output.json_schema": formed(json_schema="{"),
    "structured_output.json_schema ": formed(json_schema="[]"),
    "structured_output.json_schema  ": formed(json_schema='{"type": "object", "if": {}}'),
    "structured_output.json_schema   ": formed(json_schema="[" * 100_000),
    "structured_output.regex": formed(regex=""),
    "structured_output.regex ": formed(regex="(a"),
    "structured_output.regex  ": formed(regex="a" * 300_000),
    "structured_output.choice": formed(choice=common.TextChoice()),
    "structured_output.choice ": formed(choice=common.TextChoice(texts=["a", ""])),
    "structured_output.grammar": formed(grammar="start: nothing"),
    "structured_output.structural_tags.tags": formed(structural_tags=common.StructuralTags(triggers=["<"])),
    "structured_output.structural_tags.triggers": tagged("<f", ""),
    "structured_output.structural_tags.tags[0].begin": tagged("<g"),
    "structured_output.structural_tags.tags[0].json_schema": tagged("<f", schema="3"),
    "structured_output.structural_tags.tags[1].json_schema": structured(
        common.StructuralTag(begin="<f>", json_schema="{}"),
        common.StructuralTag(begin="<g>", json_schema='{"not": {}}'),
        triggers=("<",),
    ),
    "cache.salt": cache(salt=""),
    "cache.session_id": cache(session_id="s" * 257),
    "cache.comparison_request_id": cache(comparison_request_id=""),
    "cache.comparison_request_id ": cache(comparison_request_id="é" * 65),
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
        error = await refusal(generate(stack.stub, message, patience(30)))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT, field
        assert list(error.fields) == [field.strip()]
    assert stack.manager.admitted_ids == []
    assert (await stack.stub.GetLoads(pb.GetLoadsRequest())).waiting_requests == 0
    error = await refusal(generate(stack.stub, ids(1, model="other"), patience(30)))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.NOT_FOUND, ["model"])
    # A router says the same of itself.
    assert error.message.startswith("the only model here is ")


async def test_the_error_of_a_long_prompt_names_the_bound(stack: Stack) -> None:
    for said, asked in {
        "has 400 tokens; at most 399 fit": ids(*[1] * 400),
        "is more than fits after 390 prompt tokens, which is 10": ids(*[1] * 390, max_tokens=11),
    }.items():
        error = await refusal(generate(stack.stub, asked, patience(30)))
        assert (error.reason, said in error.message) == ("CONTEXT_LENGTH_EXCEEDED", True)


async def test_an_invalid_request_is_not_tokenized(stack: Stack) -> None:
    for field in ("input", "text", "text  ", "chat.messages", "chat.messages ", "chat.messages[1].role"):
        request = pb.TokenizePromptRequest()
        match BAD[field].WhichOneof("input"):
            case "text":
                request.text = BAD[field].text
            case "chat":
                request.chat.CopyFrom(BAD[field].chat)
        error = await refusal(stack.stub.TokenizePrompt(request, timeout=patience(5)))
        assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, [field.strip()])
    # Callers count tokens to learn whether the prompt fits.
    long = await stack.stub.TokenizePrompt(pb.TokenizePromptRequest(text=BAD["text "].text), timeout=patience(5))
    assert len(long.token_ids) > 400


async def test_an_impossible_rule_fails_only_its_own_requests(stack: Stack) -> None:
    stack.manager.rule("ruled", common.EvictionPolicy(kind="EVICTION_KIND_SUM", recent_tokens=3))
    with pytest.raises(grpc.aio.AioRpcError, match=r"rule ruled.*recent_tokens") as caught:
        await generate(stack.stub, ids(1, 2, max_tokens=2, cache=pb.CacheOptions(salt="ruled")), patience(30))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await generate(stack.stub, ids(1, 2, max_tokens=2), patience(30))).token_ids
    assert len({one.scheduler_epoch for one in stack.manager.admissions}) == 1


async def test_a_request_that_never_fits_is_refused(stack: Stack) -> None:
    # 100 blocks of 4: a whole prompt and the table that it moves to do not fit in beside each other.
    policy = common.EvictionPolicy(kind="EVICTION_KIND_KEYDIFF", max_cache_tokens=300)  # type: ignore[arg-type]
    error = await refusal(generate(stack.stub, ids(*[1] * 390, max_tokens=2, eviction_policy=policy), patience(30)))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["eviction_policy"])
    assert "100" in error.message
    # An operator has made the pool smaller since the model was described.
    stack.manager.shrink(10)
    error = await refusal(generate(stack.stub, ids(*[1] * 60, max_tokens=2), patience(30)))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["input"])
    assert "do not fit into 10 blocks" in error.message


async def test_a_rules_policy_that_needs_more_blocks_than_there_are_is_an_operators(stack: Stack) -> None:
    stack.manager.rule("ruled", common.EvictionPolicy(kind="EVICTION_KIND_KEYDIFF", max_cache_tokens=300))
    request = ids(*[1] * 390, max_tokens=2, cache=pb.CacheOptions(salt="ruled"))
    error = await refusal(generate(stack.stub, request, patience(30)))
    assert (error.code, error.reason, error.fields) == (grpc.StatusCode.FAILED_PRECONDITION, "RULE_POLICY", {})
    assert "blocks at once" in error.message


async def test_a_call_without_deadline_is_served(stack: Stack) -> None:
    parts = [part async for part in stack.stub.StreamGenerate(ids(1, max_tokens=2, ignore_eos=True))]
    assert sum(len(part.token_ids) for part in parts) == 2


async def test_the_model_is_described(stack: Stack) -> None:
    model = await stack.stub.GetModel(pb.GetModelRequest())
    assert (model.model, model.max_model_tokens, model.dtype) == ("fake", 400, "float32")


async def say_the_cat(stack: Stack, *options: str) -> tuple[str, str]:
    """The command line client's output and its messages."""
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
