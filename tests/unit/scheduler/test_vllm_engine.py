"""vLLM's engine contract, as gateways call it: requests and answers, refusals, the tokenizer, and events."""

import asyncio
import contextlib
import hashlib
import io
import json
import re
import zipfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.rpc.channel import open_channel
from protos.rpc.identity import Role
from protos.rpc.roles import is_audited, roles_of
from protos.rpc.security import Security
from protos.rpc.server import Server
from protos.smg import common_pb2 as smg
from protos.vllm import engine_pb2 as vllm
from protos.vllm import engine_pb2_grpc as rpc
from scheduler.app import Scheduler
from scheduler.frontend.chat_template import ChatTemplate
from scheduler.frontend.vllm import gateway_events, service, translate
from scheduler.settings import SchedulerSettings
from tests.support.generation import greedy_request
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, refusal, run, waiting
from tests.support.scheduler.tokenizers import EOS

BLOCK = 4


@contextlib.asynccontextmanager
async def gateway(address: str) -> AsyncIterator["rpc.VllmEngineAsyncStub"]:
    """A gateway's stub."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield rpc.VllmEngineStub(channel)


@pytest.fixture
async def engine(stack: Stack) -> AsyncIterator["rpc.VllmEngineAsyncStub"]:
    """That of the stack."""
    async with gateway(stack.address) as stub:
        yield stub


def request(prompt: list[int], max_tokens: int, *, stream: bool = False, **sampling: object) -> vllm.GenerateRequest:
    """A greedy request for exactly N = `max_tokens` tokens, unless another field says otherwise."""
    params = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | sampling
    return vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=prompt), sampling_params=params, stream=stream)


async def answers(call: AsyncIterator[vllm.GenerateResponse]) -> list[vllm.GenerateResponse]:
    return [answer async for answer in call]


async def test_a_request_gets_the_models_tokens_in_one_answer(stack: Stack, engine: "rpc.VllmEngineAsyncStub") -> None:
    prompt = prompt_of(41)
    for cached in (0, 40):
        [answer] = await answers(engine.Generate(request(prompt, 12), timeout=patience(30)))
        assert answer.complete == vllm.GenerateComplete(
            output_ids=stack.executor.expected(prompt, 12),
            finish_reason="length",
            prompt_tokens=41,
            completion_tokens=12,
            cached_tokens=cached,
        )


async def test_a_stream_has_new_tokens_in_chunks_and_all_at_the_end(
    stack: Stack, engine: "rpc.VllmEngineAsyncStub"
) -> None:
    prompt = prompt_of(30)
    stack.executor.step_seconds = 0.01
    *chunks, end = await answers(engine.Generate(request(prompt, 12, stream=True), timeout=patience(30)))
    assert len(chunks) > 1
    assert [token for chunk in chunks for token in chunk.chunk.token_ids] == list(end.complete.output_ids)
    assert list(end.complete.output_ids) == stack.executor.expected(prompt, 12)
    for chunk in chunks:
        assert (chunk.chunk.prompt_tokens, chunk.chunk.completion_tokens) == (30, len(chunk.chunk.token_ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_each_sample_has_an_end_and_the_whole_prompt(
    stack: Stack, engine: "rpc.VllmEngineAsyncStub", stream: bool
) -> None:
    prompt = prompt_of(30)
    found = await answers(engine.Generate(request(prompt, 5, stream=stream, n=3, seed=-7), timeout=patience(30)))
    ends = {answer.complete.index: answer.complete for answer in found if answer.HasField("complete")}
    assert sorted(ends) == [0, 1, 2]
    assert {(end.prompt_tokens, end.completion_tokens) for end in ends.values()} == {(30, 5)}
    [same] = await run(stack, greedy_request(prompt, 5, sampling=pb.SamplingParams(seed=(1 << 64) - 7)))
    assert list(ends[0].output_ids) == same.token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_of_new_tokens_with_the_most_likely_ones(
    engine: "rpc.VllmEngineAsyncStub", stream: bool
) -> None:
    found = await answers(engine.Generate(request(prompt_of(9), 5, stream=stream, logprobs=2), timeout=patience(30)))
    logprobs = vllm.OutputLogProbs()
    for answer in found:
        logprobs.MergeFrom(answer.chunk.output_logprobs if stream else answer.complete.output_logprobs)
    assert list(logprobs.token_ids) == list(found[-1].complete.output_ids)
    assert list(logprobs.token_logprobs) == [-0.5] * 5
    assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[0, 1]] * 5
    [bare] = await answers(engine.Generate(request(prompt_of(9), 1, logprobs=0), timeout=patience(30)))
    assert not bare.complete.output_logprobs.top_logprobs
    assert len(bare.complete.output_logprobs.token_logprobs) == 1


async def test_the_end_names_what_has_stopped_the_output(stack: Stack, engine: "rpc.VllmEngineAsyncStub") -> None:
    prompt = prompt_of(30)
    [whole] = await run(stack, greedy_request(prompt, 40))
    text, token = whole.text[10:13], whole.token_ids[7]
    [by_text] = await answers(engine.Generate(request(prompt, 40, stop=["never", text]), timeout=patience(30)))
    assert by_text.complete.finish_reason == "stop"
    assert (by_text.complete.WhichOneof("matched_stop"), by_text.complete.matched_stop_str) == (
        "matched_stop_str", text,
    )  # fmt: skip
    assert list(by_text.complete.output_ids) == whole.token_ids[: len(by_text.complete.output_ids)]
    [by_token] = await answers(
        engine.Generate(request(prompt, 40, stop=["never"], stop_token_ids=[token]), timeout=patience(30))
    )
    assert by_token.complete.finish_reason == "stop"
    assert (by_token.complete.WhichOneof("matched_stop"), by_token.complete.matched_token_id) == (
        "matched_token_id", token,
    )  # fmt: skip
    assert by_token.complete.output_ids[-1] == token


async def test_the_end_names_no_stop_string_of_the_least_tokens(
    stack: Stack, engine: "rpc.VllmEngineAsyncStub"
) -> None:
    prompt = prompt_of(30)
    [whole] = await run(stack, greedy_request(prompt, 40))
    least = 10
    bound = len(stack.executor.tokenizer.decode(whole.token_ids[:least]))
    early, late = whole.text[bound - 4 : bound - 1], whole.text[-12:-9]
    assert whole.text.index(late) > whole.text.rindex(early) == bound - 4
    asked = request(prompt, 40, stop=[early, late], min_tokens=least)
    [found] = await answers(engine.Generate(asked, timeout=patience(30)))
    assert (found.complete.finish_reason, found.complete.matched_stop_str) == ("stop", late)


async def test_the_models_own_end_is_no_match(run_stack: StackFactory) -> None:
    executor, prompt = FakeExecutor(), prompt_of(30)
    executor.eos_token_ids = [EOS, executor.expected(prompt, 5)[-1]]
    async with run_stack(executor) as stack, gateway(stack.address) as engine:
        [answer] = await answers(
            engine.Generate(request(prompt, 40, stop=["never"], ignore_eos=False), timeout=patience(30))
        )
        assert (answer.complete.finish_reason, answer.complete.WhichOneof("matched_stop")) == ("stop", None)


def test_absent_numbers_are_the_contracts_defaults() -> None:
    message = translate.request(vllm.GenerateRequest(request_id="r", text="x"))
    assert MessageToDict(message, preserving_proto_field_name=True) == {
        "request_id": "r",
        "text": "x",
        "n": 1,
        "keep_special_tokens": True,
        "sampling": {
            "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0,
            "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        },
    }  # fmt: skip


TAG = json.dumps({"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]})
FORMS = {
    "json_schema": ({"json_schema": "{}"}, {"json_schema": "{}"}),
    "regex": ({"regex": "a+"}, {"regex": "a+"}),
    "grammar": ({"grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    "choice": ({"choice": {"choices": ["a", "b"]}}, {"choice": {"texts": ["a", "b"]}}),
    "json_object": ({"json_object": True}, {"json_schema": '{"type": "object"}'}),
    "structural_tag": (
        {"structural_tag": TAG},
        {
            "structural_tags": {
                "tags": [{"begin": "<f>", "json_schema": "{}", "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
    ),
}
GIVEN = vllm.SamplingParams(
    temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, frequency_penalty=1, presence_penalty=-1,
    repetition_penalty=2, max_tokens=9, min_tokens=2, stop=["s"], stop_token_ids=[4], skip_special_tokens=True,
    spaces_between_special_tokens=True, include_stop_str_in_output=True, grammar_from_first_token=True,
    ignore_eos=True, n=2, logprobs=5, prompt_logprobs=1, seed=6, logit_bias={7: -1.5}, truncate_prompt_tokens=8,
)  # fmt: skip


def test_every_field_of_a_request_is_translated_or_about_text() -> None:
    asked = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(original_text="t", input_ids=[1]), sampling_params=GIVEN)
    assert MessageToDict(translate.request(asked), preserving_proto_field_name=True) == {
        "token_ids": {"token_ids": [1]},
        "sampling": {
            "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "frequency_penalty": 1.0,
            "presence_penalty": -1.0, "repetition_penalty": 2.0, "num_logprobs": 5, "num_prompt_logprobs": 1,
            "seed": "6", "logit_bias": {"7": -1.5}, "min_tokens": 2,
        },
        "max_tokens": 9,
        "stop": ["s"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "n": 2,
        "prompt_truncation": {"max_tokens": 8},
    }  # fmt: skip
    # A new field must be added to one of both.
    assert {field.name for field, _ in GIVEN.ListFields()} | FORMS.keys() == {
        *vllm.SamplingParams.DESCRIPTOR.fields_by_name
    }


@pytest.mark.parametrize(("given", "form"), FORMS.values(), ids=FORMS)
def test_each_constraint_becomes_a_form(given: dict[str, Any], form: dict[str, Any]) -> None:
    message = translate.request(vllm.GenerateRequest(text="x", sampling_params=given))
    assert MessageToDict(message.structured_output, preserving_proto_field_name=True) == form


def test_an_object_that_is_not_wanted_is_no_constraint() -> None:
    asked = vllm.GenerateRequest(text="x", sampling_params={"json_object": False})
    assert not translate.request(asked).HasField("structured_output")


CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"json_schema": '{"const": [1, "x"]}'}, r'\[1, "x"\]'),
    "regex": ({"regex": "(ab|cd){3}"}, "(ab|cd){3}"),
    "grammar": ({"grammar": 'root ::= "a" "b"'}, "ab"),
    "choice": ({"choice": vllm.ChoiceConstraint(choices=["left", "right"])}, "left|right"),
}


@pytest.mark.parametrize(("fields", "expected"), CONSTRAINTS.values(), ids=CONSTRAINTS)
async def test_output_matches_its_constraint(
    stack: Stack, engine: "rpc.VllmEngineAsyncStub", fields: dict[str, Any], expected: str
) -> None:
    asked = request(prompt_of(5), 40, stop=["never"], **fields)
    [answer] = await answers(engine.Generate(asked, timeout=patience(30)))
    text = stack.executor.tokenizer.decode(answer.complete.output_ids, skip_special_tokens=True)
    assert re.fullmatch(expected, text)
    assert (answer.complete.finish_reason, answer.complete.WhichOneof("matched_stop")) == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_scored_once_for_each_sample(engine: "rpc.VllmEngineAsyncStub", stream: bool) -> None:
    prompt = prompt_of(20)
    asked = request(prompt, 3, stream=stream, n=2, prompt_logprobs=2, truncate_prompt_tokens=12)
    found = await answers(engine.Generate(asked, timeout=patience(30)))
    scored = [answer.chunk if stream else answer.complete for answer in found]
    scored = [one for one in scored if one.HasField("input_logprobs")]
    assert sorted(one.index for one in scored) == [0, 1]
    for one in scored:
        logprobs = one.input_logprobs
        assert list(logprobs.token_ids) == prompt[8:]
        assert not logprobs.token_logprobs[0].HasField("value")
        assert [token.value for token in logprobs.token_logprobs[1:]] == [-float(token) for token in prompt[9:]]
        assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[]] + [[0, 1]] * 11
    [bare] = await answers(engine.Generate(request(prompt[:1], 1, prompt_logprobs=0), timeout=patience(30)))
    assert list(bare.complete.input_logprobs.token_ids) == prompt[:1]
    assert not bare.complete.input_logprobs.top_logprobs


def bad(**sampling: object) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1]), sampling_params=sampling)


IDS = vllm.TokenizedInput(input_ids=[1])
BAD = {
    "input": vllm.GenerateRequest(),
    "text": vllm.GenerateRequest(text=""),
    "tokenized.input_ids": vllm.GenerateRequest(tokenized=vllm.TokenizedInput()),
    "tokenized.input_ids[1]": vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1, 1_000_000])),
    "request_id": vllm.GenerateRequest(request_id="x" * 129, tokenized=IDS),
    "mm_inputs": vllm.GenerateRequest(tokenized=IDS, mm_inputs=vllm.MultimodalInputs()),
    "media_refs": vllm.GenerateRequest(tokenized=IDS, media_refs=vllm.MediaRefs()),
    "extra_mm_inputs": vllm.GenerateRequest(tokenized=IDS, extra_mm_inputs=[vllm.MultimodalInputs()]),
    "kv_transfer_params": vllm.GenerateRequest(tokenized=IDS, kv_transfer_params=vllm.KvTransferParams()),
    "kv_transfer_params_json": vllm.GenerateRequest(tokenized=IDS, kv_transfer_params_json="{}"),
    "data_parallel_rank": vllm.GenerateRequest(tokenized=IDS, data_parallel_rank=1),
    "data_parallel_rank ": vllm.GenerateRequest(tokenized=IDS, data_parallel_rank=-1),
    "sampling_params.temperature": bad(temperature=-1),
    "sampling_params.top_p": bad(top_p=2),
    "sampling_params.min_p": bad(min_p=float("nan")),
    "sampling_params.repetition_penalty": bad(repetition_penalty=-1),
    "sampling_params.presence_penalty": bad(presence_penalty=3),
    "sampling_params.frequency_penalty": bad(frequency_penalty=3),
    "sampling_params.max_tokens": bad(max_tokens=400),
    "sampling_params.stop[0]": bad(stop=[""]),
    "sampling_params.stop_token_ids[0]": bad(stop_token_ids=[1_000_000]),
    "sampling_params.n": bad(n=65),
    "sampling_params.n ": bad(n=(1 << 32) - 1),
    "sampling_params.logprobs": bad(logprobs=-1),
    "sampling_params.logprobs ": bad(logprobs=21),
    "sampling_params.min_tokens": bad(min_tokens=3, max_tokens=2),
    "sampling_params.logit_bias.-1": bad(logit_bias={-1: 2.0}),
    "sampling_params.logit_bias.1": bad(logit_bias={1: 101.0}),
    "sampling_params.prompt_logprobs": bad(prompt_logprobs=-1),
    "sampling_params.prompt_logprobs ": bad(prompt_logprobs=21),
    "sampling_params.truncate_prompt_tokens": bad(truncate_prompt_tokens=0),
    "sampling_params.truncate_prompt_tokens ": bad(truncate_prompt_tokens=-2),
    "sampling_params.json_schema": bad(json_schema="{"),
    "sampling_params.json_schema ": bad(json_schema='{"type": "strin"}'),
    "sampling_params.regex": bad(regex="(a"),
    "sampling_params.grammar": bad(grammar=""),
    "sampling_params.grammar ": bad(grammar="start: b"),
    "sampling_params.structural_tag": bad(structural_tag="a"),
    "sampling_params.structural_tag.structures[0].schema": bad(structural_tag=TAG.replace("{}", '{"type": 3}')),
    "sampling_params.structural_tag ": bad(structural_tag=" " * 2_000_000),
    "sampling_params.structural_tag.structures[0].begin": bad(structural_tag=TAG.replace('"<f>"', "1")),
    "sampling_params.structural_tag.structures": bad(structural_tag='{"triggers": ["a"]}'),
    "sampling_params.structural_tag.structures[0].begin ": bad(structural_tag=TAG.replace('["<f"]', '["x"]')),
    "sampling_params.choice": bad(choice=vllm.ChoiceConstraint()),
    "sampling_params.choice ": bad(choice=vllm.ChoiceConstraint(choices=["a", ""])),
}


async def test_every_wrong_field_is_named_as_the_contract_does(stack: Stack, engine: "rpc.VllmEngineAsyncStub") -> None:
    for field, message in BAD.items():
        error = await refusal(answers(engine.Generate(message, timeout=patience(30))))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT, field
        assert list(error.fields) == [field.strip()]
        assert error.message.startswith(field.strip())
    assert stack.manager.admitted_ids == []
    error = await refusal(engine.GetLoads(vllm.GetLoadsRequest(dp_rank=1), timeout=patience(10)))
    assert list(error.fields) == ["dp_rank"]
    error = await refusal(engine.Abort(vllm.AbortRequest(request_ids=["x"] * 1025), timeout=patience(10)))
    assert list(error.fields) == ["request_ids"]


async def test_abort_ends_requests_of_its_tenant_only(stack: Stack, engine: "rpc.VllmEngineAsyncStub") -> None:
    stack.executor.step_seconds = 0.01
    asked = request(prompt_of(20), 300, stream=True, n=2)
    asked.request_id = "r"
    other = greedy_request(prompt_of(21), 300, request_id="r")
    other.cache.tenant_id = "t"
    theirs = stack.stub.StreamGenerate(other, timeout=patience(30))
    own = asyncio.create_task(answers(engine.Generate(asked, timeout=patience(30))))
    await stack.manager.admitted(3)
    await engine.Abort(vllm.AbortRequest(request_ids=["r", "", "unknown"]), timeout=patience(10))
    ends = [answer.complete for answer in await own if answer.HasField("complete")]
    assert [(end.index, end.finish_reason) for end in ends] == [(0, "abort"), (1, "abort")]
    await stack.manager.until(lambda: len(stack.manager.live) == 1)
    assert not theirs.done()
    theirs.cancel()


async def test_a_request_of_the_other_service_is_aborted_too(stack: Stack, engine: "rpc.VllmEngineAsyncStub") -> None:
    stack.executor.gate.clear()
    asked = asyncio.create_task(run(stack, greedy_request(prompt_of(20), 5, request_id="r")))
    await stack.manager.admitted(1)
    await engine.Abort(vllm.AbortRequest(request_ids=["r"]), timeout=patience(10))
    [output] = await asked
    assert output.finish_reason == pb.FINISH_REASON_ABORT
    stack.executor.gate.set()


async def test_the_model_and_the_load_are_told(stack: Stack, engine: "rpc.VllmEngineAsyncStub") -> None:
    model = await engine.GetModelInfo(vllm.GetModelInfoRequest(), timeout=patience(10))
    assert (model.served_model_name, model.model_path, model.is_generation) == ("fake", "fake", True)
    assert (model.max_context_length, model.max_req_input_len, list(model.eos_token_ids)) == (400, 399, [EOS])
    # Neither a path nor a name that a hub could have.
    assert ":" in model.tokenizer_path
    assert (await engine.HealthCheck(vllm.HealthCheckRequest(), timeout=patience(10))).healthy
    stack.executor.gate.clear()
    stack.manager.gate.clear()
    running = asyncio.create_task(run(stack, greedy_request(prompt_of(40), 5)))
    await stack.manager.asked(1)
    [load] = (await engine.GetLoads(vllm.GetLoadsRequest(dp_rank=0), timeout=patience(10))).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_waiting_uncached_tokens) == (0, 1, 40)
    stack.manager.gate.set()
    await stack.manager.admitted(1)
    # The answer to it is on its way.
    await waiting(stack, 0)
    [load] = (await engine.GetLoads(vllm.GetLoadsRequest(), timeout=patience(10))).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_total_num_tokens) == (1, 0, 400)
    server = await engine.GetServerInfo(vllm.GetServerInfoRequest(), timeout=patience(10))
    assert (server.active_requests, server.block_size, server.max_num_seqs) == (1, BLOCK, load.max_running_requests)
    stack.executor.gate.set()
    await running

    async def token_usage() -> float:
        return (await engine.GetLoads(vllm.GetLoadsRequest(), timeout=patience(10))).loads[0].token_usage

    # The cache manager tells its share later.
    async with asyncio.timeout(patience(20)):
        while await token_usage() != stack.metric("cache_usage_ratio"):
            await asyncio.sleep(0.01)
    stack.scheduler.requests.set_draining(True)
    health = await engine.HealthCheck(vllm.HealthCheckRequest(), timeout=patience(10))
    assert (health.healthy, "drains" in health.message) == (False, True)
    assert (await engine.GetServerInfo(vllm.GetServerInfoRequest(), timeout=patience(10))).is_paused


async def test_what_is_not_there_is_unimplemented(engine: "rpc.VllmEngineAsyncStub") -> None:
    embedding = engine.Embed(vllm.EmbedRequest(tokenized=IDS), timeout=patience(10))
    events = answers(engine.SubscribeKvEvents(smg.SubscribeKvEventsRequest(), timeout=patience(10)))
    for call, said in ((embedding, "embeddings"), (events, "KVKEEP_SCHEDULER_KV_EVENTS")):
        error = await refusal(call)
        assert (error.code, said in error.message) == (grpc.StatusCode.UNIMPLEMENTED, True)


async def test_the_archive_has_the_tokenizer_and_its_template(
    stack: Stack, engine: "rpc.VllmEngineAsyncStub", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHUNK_BYTES", 500)
    digests = []
    for _ in range(2):
        chunks = [chunk async for chunk in engine.GetTokenizer(smg.GetTokenizerRequest(), timeout=patience(10))]
        whole = b"".join(chunk.data for chunk in chunks)
        assert len(chunks) > 1
        assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].sha256 == hashlib.sha256(whole).hexdigest()
        digests.append(chunks[-1].sha256)
    assert digests[0] == digests[1]
    opened = zipfile.ZipFile(io.BytesIO(whole))
    tokenizer = Tokenizer.from_str(opened.read("tokenizer.json").decode())
    assert tokenizer.encode("the cat").ids == stack.executor.tokenizer.encode("the cat").ids
    config = json.loads(opened.read("tokenizer_config.json"))
    messages = [{"role": "user", "content": "hello"}]
    prompt = ChatTemplate(config.pop("chat_template"), config).render(messages)
    tokenized = await stack.stub.TokenizePrompt(pb.TokenizePromptRequest(chat=pb.ChatInput(messages=messages)))
    assert tokenizer.encode(prompt).ids == list(tokenized.token_ids)
    assert json.loads(opened.read("config.json"))["eos_token_id"] == [EOS]


class Subscriber:
    """Takes batches in as a gateway does: it finds blocks by their tokens and their places."""

    def __init__(self, stub: "rpc.VllmEngineAsyncStub", number: int = 0) -> None:
        request = smg.SubscribeKvEventsRequest(start_sequence_number=number)
        self.call = stub.SubscribeKvEvents(request, timeout=patience(30))
        self.numbers = [number]
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    async def take(self) -> None:
        batch: Any = await self.call.read()
        if batch is grpc.aio.EOF:
            # Raises the error that the stream has ended with.
            await answers(self.call)
        self.numbers.append(batch.sequence_number)
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                case "removed":
                    for name in event.removed.block_hashes:
                        del self.blocks[name]
                case "stored":
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    for block in event.stored.blocks:
                        assert parent is None or parent in self.blocks
                        assert (block.block_size, len(block.token_ids)) == (BLOCK, BLOCK)
                        self.blocks[block.block_hash] = parent, tuple(block.token_ids)
                        parent = block.block_hash

    async def until(self, prompts: list[list[int]]) -> None:
        """Waits until exactly the full blocks of these prompts are known."""
        wanted = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)}
        async with asyncio.timeout(patience(20)):
            while self.known() != wanted:
                await self.take()
        assert all(after == before + 1 for before, after in pairwise(self.numbers))

    def known(self) -> set[tuple[int, ...]]:
        """The prefixes that end with a known block."""

        def prefix(name: int | None) -> tuple[int, ...]:
            if name is None:
                return ()
            parent, tokens = self.blocks[name]
            return prefix(parent) + tokens

        return {prefix(name) for name in self.blocks}


async def test_subscribers_know_the_blocks_that_their_requests_can_use(run_stack: StackFactory) -> None:
    async with run_stack(kv_events=True) as stack, gateway(stack.address) as engine:
        first, second = prompt_of(21, seed=1), prompt_of(30, seed=2)
        expected = [prompt + stack.executor.expected(prompt, 8) for prompt in (first, second)]
        # The last token of an output is not computed.
        held = [(prompt[:-1])[: (len(prompt) - 1) // BLOCK * BLOCK] for prompt in expected]
        early = Subscriber(engine)
        await early.take()
        await answers(engine.Generate(request(first, 8), timeout=patience(30)))
        await early.until(held[:1])
        # Nobody finds these without a salt.
        salted = greedy_request(prompt_of(25, seed=3), 2)
        salted.cache.salt = "s"
        await run(stack, salted)
        await answers(engine.Generate(request(second, 8), timeout=patience(30)))
        await early.until(held)
        late = Subscriber(engine, number=7)
        await late.until(held)
        assert late.numbers[:2] == [7, 8]
        prefix = kv.PrefixSelector(token_ids=first[:BLOCK])
        await stack.manager.admin.PurgeBlocks(kv.PurgeBlocksRequest(filter=kv.BlockFilter(prefix=prefix)), None)
        for subscriber in (early, late):
            await subscriber.until(held[1:])
            subscriber.call.cancel()


async def test_tenants_share_nothing(run_stack: StackFactory, keyring: Keyring, tmp_path: Path) -> None:
    async with run_stack(kv_events=True) as stack, AsyncExitStack() as exits:
        shown = [keyring.add(Role.CALLER, "acme"), keyring.add(Role.CALLER, "other"), keyring.add(Role.VIEWER)]
        address = f"unix:{tmp_path}/guarded"
        guarded = Server("guarded", security=Security(tokens_file=keyring.file), drain_seconds=0)
        guarded.listen(address, stack.scheduler.services)
        await guarded.start()
        exits.push_async_callback(guarded.stop)
        channels = [await exits.enter_async_context(open_channel(address, one)) for one in shown]
        acme, other, viewer = map(rpc.VllmEngineStub, channels)
        prompt = prompt_of(21)
        cached = []
        for stub in (acme, other, acme):
            [answer] = await answers(stub.Generate(request(prompt, 2), timeout=patience(30)))
            cached.append(answer.complete.cached_tokens)
        assert cached == [0, 0, 20]
        assert {(one.salt, one.tenant_id) for one in stack.manager.admissions} == {("acme", "acme"), ("other", "other")}
        own = request(prompt_of(25, seed=2), 3)
        await answers(acme.Generate(own, timeout=patience(30)))
        held = [(prompt + stack.executor.expected(prompt, 2))[:20], prompt_of(25, seed=2)[:24]]
        for stub, known in ((acme, held), (other, held[:1])):
            subscriber = Subscriber(stub)
            await subscriber.until(known)
            subscriber.call.cancel()
        stack.executor.gate.clear()
        own.request_id = "r"
        running = asyncio.create_task(answers(acme.Generate(own, timeout=patience(30))))
        await stack.manager.admitted(1)
        await other.Abort(vllm.AbortRequest(request_ids=["r"]), timeout=patience(10))
        await asyncio.sleep(0.05)  # subject: nothing ends meanwhile
        assert not running.done()
        await acme.Abort(vllm.AbortRequest(request_ids=["r"]), timeout=patience(10))
        [ended] = await running
        assert ended.complete.finish_reason == "abort"
        stack.executor.gate.set()
        assert (await viewer.GetModelInfo(vllm.GetModelInfoRequest(), timeout=patience(10))).served_model_name == "fake"
        for call in (
            answers(viewer.Generate(own, timeout=patience(10))),
            viewer.Abort(vllm.AbortRequest(), timeout=patience(10)),
            answers(viewer.SubscribeKvEvents(smg.SubscribeKvEventsRequest(), timeout=patience(10))),
        ):
            assert (await refusal(call)).code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_number_that_leaves_no_more_is_refused(run_stack: StackFactory) -> None:
    async with run_stack(kv_events=True) as stack, gateway(stack.address) as engine:
        error = await refusal(Subscriber(engine, 1 << 63).take())
        assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["start_sequence_number"])


async def test_a_subscription_ends_with_its_executor_and_the_next_one_begins_anew(run_stack: StackFactory) -> None:
    async with run_stack(kv_events=True) as stack, gateway(stack.address) as engine:
        await answers(engine.Generate(request(prompt_of(21), 1), timeout=patience(30)))
        before = Subscriber(engine)
        await before.until([prompt_of(21)[:20]])
        stack.executor.restart()
        stack.manager.register()
        # The next call wakes those that wait for events.
        await answers(engine.Generate(request(prompt_of(5), 1), timeout=patience(30)))
        error = await refusal(before.until([]))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "EVENTS_ENDED")
        after = Subscriber(engine, before.numbers[-1])
        await after.take()
        assert after.known() == set()
        assert after.numbers[-1] == before.numbers[-1] + 1
        after.call.cancel()


def test_the_pool_with_full_attention_is_told() -> None:
    def pool(*windows: int) -> str:
        return gateway_events.pool_id(execution_pb2.GetExecutorResponse(executor_id="e", attention_windows=windows))

    assert [pool(), pool(0), pool(8, 0), pool(8, 4)] == ["e/0", "e/0", "e/1", "e/0"]


def test_the_blocks_of_others_are_not_told() -> None:
    def stored(key: int, parent: int = 0, **fields: object) -> kv.Event:
        block = {"tier": "TIER_DEVICE", "token_ids": [key]} | fields
        keys = {"key": bytes([key]) * 32, "parent_key": bytes([parent]) * 32 if parent else b""}
        return kv.Event(kind="EVENT_KIND_STORED", block=kv.Block(**keys, **block))

    events = [
        stored(1),
        stored(2, salt="acme"),
        stored(3, 2, salt="acme"),
        stored(4, salt="acme/other"),
        stored(5, salt="acme", adapter_id=1),
        stored(6, salt="acme", token_ids=[]),
        stored(7, 6, salt="acme"),
    ]
    for salt, told in ((None, [1]), ("acme", [2, 3])):
        found = gateway_events.Told(1, salt).of(events)
        assert [token for event in found for block in event.stored.blocks for token in block.token_ids] == told


def test_a_block_that_moves_leaves_one_tier_and_comes_to_another() -> None:
    def event(kind: str, key: int, tier: str, parent: int = 0) -> kv.Event:
        parent_key = bytes([parent]) * 32 if parent else b""
        block = kv.Block(key=bytes([key]) * 32, parent_key=parent_key, tier=f"TIER_{tier}", token_ids=[key])
        return kv.Event(kind=f"EVENT_KIND_{kind}", block=block)

    told = gateway_events.Told(1, None)
    found = told.of([event("STORED", 1, "DEVICE"), event("STORED", 2, "DEVICE", 1), event("UPDATED", 1, "DEVICE")])
    assert [len(one.stored.blocks) for one in found] == [2]
    found = told.of(
        [
            event("UPDATED", 2, "HOST", 1),
            event("UPDATED", 2, "DISK", 1),
            event("REMOVED", 1, "DEVICE"),
            event("REMOVED", 2, "DISK", 1),
            event("REMOVED", 3, "DISK", 1),
        ]
    )
    changes = []
    for one in found:
        kind = one.WhichOneof("data")
        part = one.stored if kind == "stored" else one.removed
        level = part.blocks[0].cache_level if kind == "stored" else part.cache_level
        changes.append((kind, smg.KvCacheTier.Name(part.tier).removeprefix("KV_CACHE_TIER_"), level))
    assert changes == [
        ("removed", "DEVICE", 0),
        ("stored", "HOST", 1),
        ("removed", "HOST", 1),
        ("stored", "DISK", 2),
        ("removed", "DEVICE", 0),
        ("removed", "DISK", 2),
    ]


async def test_a_router_answers_as_one_engine(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet, gateway(f"unix:{tmp_path}/router") as engine:
        prompt = prompt_of(30)
        expected = fleet.engines[0].executor.expected(prompt, 12)
        for _ in range(2):
            [answer] = await answers(engine.Generate(request(prompt, 12), timeout=patience(30)))
            assert list(answer.complete.output_ids) == expected
        model = await engine.GetModelInfo(vllm.GetModelInfoRequest(), timeout=patience(10))
        assert model.served_model_name == "fake"
        assert [chunk async for chunk in engine.GetTokenizer(smg.GetTokenizerRequest(), timeout=patience(10))]
        error = await refusal(answers(engine.SubscribeKvEvents(smg.SubscribeKvEventsRequest(), timeout=patience(10))))
        assert error.code is grpc.StatusCode.UNIMPLEMENTED


async def test_nothing_but_health_is_answered_before_the_neighbours_are_there(tmp_path: Path) -> None:
    server = Server("scheduler", drain_seconds=0)
    scheduler = Scheduler(SchedulerSettings(kv_events=True), server, CollectorRegistry())
    server.listen(f"unix:{tmp_path}/scheduler", scheduler.services)
    await server.start()
    try:
        async with gateway(f"unix:{tmp_path}/scheduler") as engine:
            health = await engine.HealthCheck(vllm.HealthCheckRequest(), timeout=patience(10))
            assert (health.healthy, "waits" in health.message) == (False, True)
            for call in (
                answers(engine.Generate(request([1], 1), timeout=patience(10))),
                engine.GetModelInfo(vllm.GetModelInfoRequest(), timeout=patience(10)),
                engine.Abort(vllm.AbortRequest(request_ids=["r"]), timeout=patience(10)),
                answers(engine.GetTokenizer(smg.GetTokenizerRequest(), timeout=patience(10))),
                answers(engine.SubscribeKvEvents(smg.SubscribeKvEventsRequest(), timeout=patience(10))),
            ):
                assert (await refusal(call)).reason == "NOT_READY"
    finally:
        await server.stop()


def test_only_callers_generate_and_read_events() -> None:
    watching = {Role.CALLER, Role.OPERATOR, Role.VIEWER}
    for method in vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods:
        name = f"{service.VLLM_SERVICE}/{method.name}"
        assert roles_of(name) == (watching if method.name.startswith(("Get", "HealthCheck")) else {Role.CALLER})
        assert is_audited(name) is (method.name == "SubscribeKvEvents")
