"""Adapters on the real stack: PEFT's output, prefix hits, token eviction, load and unload, a dead executor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.models.files import find
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.channel import open_channel
from tests.stack import Stack, model_cache
from tests.support.adapters import generated, save_adapter
from tests.support.generation import generate, generate_all, greedy_request
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.scheduler.http import ask

pytestmark = pytest.mark.model

PROMPTS = [list(range(1000 + 50 * number, 1040 + 50 * number)) for number in range(3)]
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the default model."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        save_adapter(find("", model_cache()).source, folder / name, seed, size=0.04, r=8 * (seed + 1))
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    settings = {"executor_adapters": f"one={folder}/one", "executor_adapter_dir": folder}
    with Stack(scheduler_http_address=free_address(), **settings) as stack:
        yield stack


def expected(folder: Path, name: str, prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    return generated(find("", model_cache()).source, folder / name if name else None, prompts, count)


async def post(stack: Stack, path: str, **body: str) -> int:
    return (await ask(stack.http, "POST", f"/v1/{path}_lora_adapter", json.dumps(body))).status


async def test_requests_of_adapters_get_what_peft_generates_and_find_their_own_blocks(
    stack: Stack, folder: Path
) -> None:
    assert await post(stack, "load", lora_name="two", lora_path="two") == 200
    names = ["one", "two", ""]
    requests = [greedy_request(prompt, COUNT, model=name) for name in names for prompt in PROMPTS]
    wanted = [ids for name in names for ids in expected(folder, name, PROMPTS)]
    assert wanted[:3] != wanted[3:6] != wanted[6:] != wanted[:3]
    for cached in (0, 32):
        outputs = await generate_all(stack.scheduler, requests, concurrency=len(requests), seconds=patience(60))
        assert [output.token_ids for output in outputs] == wanted
        assert {output.usage.cached_tokens // 16 * 16 for output in outputs} == {cached}
    policy = common.EvictionPolicy(kind=common.EVICTION_KIND_SLIDING_WINDOW, start_tokens=4, recent_tokens=48)
    evicting = [greedy_request(PROMPTS[0], 60, model=name, eviction_policy=policy) for name in names]
    together = await generate_all(stack.scheduler, evicting, concurrency=3, seconds=patience(60))
    async with open_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        alone = [await generate(stub, request, patience(60)) for request in evicting]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.token_ids[:COUNT] for output in together] == wanted[::3]


async def test_an_adapter_outlives_the_executor_and_goes_when_it_is_unloaded(stack: Stack, folder: Path) -> None:
    assert await post(stack, "load", lora_name="two", lora_path=str(folder / "two")) == 200
    long = 60
    async with open_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        begun = asyncio.Event()
        running = asyncio.create_task(
            generate(stub, greedy_request(PROMPTS[0], long, model="two"), patience(60), begun)
        )
        await begun.wait()
        await asyncio.to_thread(stack.kill, "executor")
        await asyncio.to_thread(stack.start, "executor")
        await asyncio.to_thread(stack.wait_until_serving, "executor")
        assert (await running).token_ids == expected(folder, "two", PROMPTS[:1], long)[0]
        model = await stub.GetModel(pb.GetModelRequest(), timeout=patience(30))
        assert list(model.adapters) == ["one", "two"]
        assert await post(stack, "unload", lora_name="two") == 200
        assert await post(stack, "unload", lora_name="two") == 404
        answer = await ask(stack.http, "POST", "/v1/completions", json.dumps({"model": "two", "prompt": "x"}))
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
