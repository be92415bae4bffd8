"""Other weights on the real stack: what transformers generates with them, blocks of each version, a dead executor."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.models.files import find
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.channel import open_channel
from tests.stack import Stack, model_cache
from tests.support.adapters import generated
from tests.support.generation import generate, generate_all, greedy_request
from tests.support.pages import elsewhere
from tests.support.patience import patience

pytestmark = pytest.mark.model

PROMPTS = [list(range(1000 + 50 * number, 1040 + 50 * number)) for number in range(3)]
COUNT = 12
VERSION = "step-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the default model's weights after some training."""
    folder, start = tmp_path_factory.mktemp("weights"), Path(find("", model_cache()).source)
    trained = folder / VERSION
    shutil.copytree(start, trained)
    generator = torch.Generator().manual_seed(1)
    for file in trained.glob("*.safetensors"):
        tensors = load_file(file)
        moved = {name: one + torch.randn(one.shape, generator=generator) * 0.01 for name, one in tensors.items()}
        save_file(moved, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with Stack(**elsewhere(), executor_weights_dir=folder) as stack:
        yield stack


async def update(stack: Stack, version: str) -> None:
    async with open_channel(stack.scheduler) as channel:
        stub: rpc.SchedulerAdminServiceAsyncStub = rpc.SchedulerAdminServiceStub(channel)
        await stub.UpdateWeights(pb.UpdateWeightsRequest(weight_version=version, path=version), timeout=patience(60))


async def answers(stack: Stack) -> tuple[list[list[int]], set[int]]:
    """The output of every prompt, and of how many tokens of each there were whole blocks in the cache."""
    requests = [greedy_request(prompt, COUNT) for prompt in PROMPTS]
    outputs = await generate_all(stack.scheduler, requests, concurrency=3, seconds=patience(60))
    return [one.token_ids for one in outputs], {one.usage.cached_tokens // 16 * 16 for one in outputs}


async def test_each_version_answers_as_transformers_does_and_finds_its_own_blocks(stack: Stack, folder: Path) -> None:
    start = generated(find("", model_cache()).source, None, PROMPTS, COUNT)
    trained = generated(str(folder / VERSION), None, PROMPTS, COUNT)
    assert start != trained
    assert await answers(stack) == (start, {0})
    await update(stack, VERSION)
    assert await answers(stack) == (trained, {0})
    assert await answers(stack) == (trained, {32})
    await update(stack, "")
    assert await answers(stack) == (start, {32})


async def test_a_comparison_says_that_the_weights_have_changed(stack: Stack) -> None:
    messages = [{"role": "user", "content": "Which river flows through Paris, and where does it begin and end?"}]
    async with openai.AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0) as client:

        async def said(to: str) -> tuple[str | None, str | None, str | None]:
            """What OpenAI, Anthropic and the cache call it."""
            body = {
                "prompt_cache_options": {"comparison_response_id": to},
                "diagnostics": {"previous_message_id": to},
            }
            answer = await client.chat.completions.create(model="", messages=messages, max_tokens=2, extra_body=body)
            more = answer.model_extra or {}
            theirs = more["diagnostics"] and more["diagnostics"]["cache_miss_reason"]["type"]
            return more["prompt_cache_diagnostics"].get("reason"), theirs, more["kvkeep"]["reason"]

        first = await client.chat.completions.create(model="", messages=messages, max_tokens=2)
        assert await said(first.id) == (None, None, None)
        await update(stack, VERSION)
        assert await said(first.id) == ("model_changed", "model_changed", "weights_changed")
        await update(stack, "")
        assert await said(first.id) == (None, None, None)


async def test_a_running_request_goes_on_and_an_executor_that_starts_again_has_the_weights(
    stack: Stack, folder: Path
) -> None:
    [trained] = generated(str(folder / VERSION), None, PROMPTS[:1], COUNT)
    async with open_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        begun = asyncio.Event()
        running = asyncio.create_task(generate(stub, greedy_request(PROMPTS[1], 300), patience(60), begun))
        await begun.wait()
        await update(stack, VERSION)
        assert len((await running).token_ids) == 300
        assert (await generate(stub, greedy_request(PROMPTS[0], COUNT), patience(60))).token_ids == trained
        await asyncio.to_thread(stack.kill, "executor")
        await asyncio.to_thread(stack.start, "executor")
        await asyncio.to_thread(stack.wait_until_serving, "executor")
        assert (await generate(stub, greedy_request(PROMPTS[0], COUNT), patience(60))).token_ids == trained
