"""The whole stack on a CUDA device: real processes, a model of random weights, a killed cache manager."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from bench.gpu.parts import Bench, Figure, WrongError
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import Stack
from tests.support.generation import Output, generate, generate_all, greedy_request
from tests.support.scheduler.tokenizers import byte_level_tokenizer

# The shape of Llama 3.2 1B.
MODEL = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=None,
)
REQUESTS, PROMPT, OUTPUT = 256, 512, 128
HOST_BYTES = 4 << 30
KILLED_OUTPUT = 600


def save(config: PretrainedConfig, folder: Path, dtype: torch.dtype, device: str) -> None:
    """Saves a model with random weights, and a tokenizer for its first ids."""
    torch.manual_seed(1)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))


def serve(_: Bench) -> Sequence[Figure]:
    """Measures requests at once, the same requests again, and a stream during which the cache manager is killed."""
    return serve_on("cuda", MODEL, torch.bfloat16, REQUESTS, PROMPT, OUTPUT, KILLED_OUTPUT)


def serve_on(
    device: str, config: PretrainedConfig, dtype: torch.dtype, requests: int, prompt: int, output: int, killed: int
) -> Sequence[Figure]:
    """Measures on any device, with these sizes. Raises WrongError if an output is wrong."""
    rng = random.Random(3)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(prompt)] for _ in range(requests)]
    with tempfile.TemporaryDirectory() as folder:
        save(config, Path(folder), dtype, device)
        settings: dict[str, Any] = {
            "executor_model": folder,
            "executor_device": device,
            "executor_dtype": str(dtype).removeprefix("torch."),
            "executor_max_tokens": 2 * requests * (prompt + output),
            "executor_host_cache_size": HOST_BYTES if device == "cuda" else 1 << 26,
            "scheduler_max_running": requests,
            "scheduler_max_batched_tokens": 2048,
        }
        begin = time.perf_counter()
        with Stack(**settings) as stack:
            started = time.perf_counter() - begin
            log = stack.log_path("executor").read_text()
            if device == "cuda" and "graphs are captured" not in log:
                raise WrongError(f"the executor runs without graphs: {log[-500:]}")
            return [
                Figure("stack, until it serves", started, "s"),
                *asyncio.run(_load(stack, prompts, output)),
                asyncio.run(_killed(stack, prompts[0], killed)),
            ]


async def _load(stack: Stack, prompts: Sequence[list[int]], output: int) -> list[Figure]:
    asked = [greedy_request(prompt, output) for prompt in prompts]
    rounds = []
    # Requests with different prompts warm up the code that runs only with requests.
    warm = [greedy_request(prompt[1:9], 4) for prompt in prompts[:8]]
    await generate_all(stack.scheduler, warm, concurrency=8)
    for _ in range(2):
        begin = time.monotonic()
        rounds.append((await generate_all(stack.scheduler, asked, concurrency=len(asked)), begin, time.monotonic()))
    figures = []
    for name, (outputs, begin, end) in zip(("new prompts", "the same again"), rounds, strict=True):
        if lengths := {len(one.token_ids) for one in outputs} - {output}:
            raise WrongError(f"outputs of {sorted(lengths)} tokens instead of {output}")
        first = sorted(one.token_times[0] - begin for one in outputs)
        gaps = [
            (one.token_times[-1] - one.token_times[0]) / (output - 1) for one in outputs if len(one.token_times) > 1
        ]
        figures += [
            Figure(f"stack, {name}: output", len(outputs) * output / (end - begin), "tokens/s"),
            Figure(f"stack, {name}: first token, median", statistics.median(first) * 1e3, "ms"),
            Figure(f"stack, {name}: between tokens, median", statistics.median(gaps) * 1e3, "ms"),
        ]
    cached = sum(one.usage.cached_tokens for one in rounds[1][0]) / sum(map(len, prompts))
    figures.append(Figure("stack, the same again: prompt tokens from the cache", 100 * cached, "%", at_least=95))
    return figures


async def _killed(stack: Stack, prompt: Sequence[int], output: int) -> Figure:
    """Kills the cache manager during a stream; returns the seconds until the manager serves again."""
    request = greedy_request(prompt[::-1], output)
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        await generate(stub, request)
        # With the prompt from the cache, as in the stream: steps of another size may round to another token.
        expected = await generate(stub, request)
        begun = asyncio.Event()
        stream: asyncio.Task[Output] = asyncio.create_task(generate(stub, request, begun=begun))
        await begun.wait()
        begin = time.monotonic()
        await asyncio.to_thread(stack.kill, "cachemgr")
        stack.start("cachemgr")
        await asyncio.to_thread(stack.wait_until_serving, "cachemgr")
        seconds = time.monotonic() - begin
        found = await stream
    if found.token_ids != expected.token_ids:
        raise WrongError("the output of a stream changed when the cache manager was killed")
    return Figure("stack, cache manager killed in a stream: until it serves", seconds, "s")
