"""Metrics of ended requests: nothing is counted twice."""

import asyncio
import time

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.generation import generate_samples
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, waiting

LATENCIES = ("queue", "time_to_first_token", "request")


def counted(stack: Stack) -> list[float]:
    """How many requests each histogram knows."""
    return [stack.metric(f"{name}_seconds_count") for name in LATENCIES]


async def test_a_request_is_counted_once_however_many_samples_it_has(stack: Stack) -> None:
    outputs = await generate_samples(stack.stub, request(prompt_of(21), 30, n=3), patience(30))
    assert counted(stack) == [1, 1, 1]
    assert stack.metric("requests_total", finish_reason="length") == 1
    assert stack.metric("output_tokens_total") == sum(output.usage.output_tokens for output in outputs) == 90
    assert stack.metric("inter_token_latency_seconds_count") == 90 - 3
    assert stack.metric("prompt_tokens_total") == sum(output.usage.prompt_tokens for output in outputs) == 21


async def test_cached_tokens_are_counted_as_in_the_usage(stack: Stack) -> None:
    outputs = [(await generate_samples(stack.stub, request(prompt_of(21), 3), patience(30)))[0] for _ in range(2)]
    assert stack.metric("cached_tokens_total") == sum(output.usage.cached_tokens for output in outputs) == 20
    assert stack.metric("prompt_tokens_total") == 42


async def test_output_that_a_stop_string_ends_is_counted_as_its_usage_says(stack: Stack) -> None:
    [whole] = await generate_samples(stack.stub, request(prompt_of(9), 60), patience(30))
    before = stack.metric("output_tokens_total")
    stop = whole.text[20:24]
    [output] = await generate_samples(stack.stub, request(prompt_of(9), 300, stop=[stop]), patience(30))
    assert stack.metric("output_tokens_total") - before == output.usage.output_tokens == len(output.token_ids) < 60
    assert stack.metric("requests_total", finish_reason="stop") == 1


async def test_an_aborted_request_is_counted_and_a_refused_one_has_no_latency(stack: Stack) -> None:
    call = stack.stub.StreamGenerate(request(prompt_of(20), 300), timeout=patience(30))
    await call.read()
    call.cancel()
    await stack.manager.unused()
    with pytest.raises(grpc.aio.AioRpcError):
        await generate_samples(stack.stub, request([], 1), patience(30))
    assert stack.metric("requests_total", finish_reason="abort") == 1
    assert stack.metric("refused_requests_total", reason="INVALID_FIELD") == 1
    assert counted(stack) == [1, 1, 1]


async def test_a_caller_that_leaves_before_the_first_step_has_only_an_end(stack: Stack) -> None:
    stack.manager.gate.clear()
    call = stack.stub.StreamGenerate(request(prompt_of(20), 5), timeout=patience(30))
    await waiting(stack, 1)
    call.cancel()
    await waiting(stack, 0)
    stack.manager.gate.set()
    await stack.manager.unused()
    assert counted(stack) == [0, 0, 1]


# vLLM's names and the names of the numbers that they show.
NAMES = {
    "kv_cache_usage_perc": "cache_usage_ratio",
    "num_requests_running": "running_requests",
    "num_requests_waiting": "waiting_requests",
    "num_preemptions_total": "preemptions_total",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "output_tokens_total",
    "prefix_cache_queries_total": "prompt_tokens_total",
    "prefix_cache_hits_total": "cached_tokens_total",
    "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum": "time_to_first_token_seconds_sum",
    "inter_token_latency_seconds_count": "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_sum": "request_seconds_sum",
    "request_queue_time_seconds_sum": "queue_seconds_sum",
}


async def test_vllms_names_say_the_same(run_stack: StackFactory) -> None:
    started = time.time()
    async with run_stack(vllm_metrics=True) as stack:
        for _ in range(2):
            await generate_samples(stack.stub, request(prompt_of(21), 3), patience(30))
        running = stack.stub.StreamGenerate(request(prompt_of(21), 300), timeout=patience(30))
        await running.read()
        async with asyncio.timeout(patience(20)):
            while not stack.metric("cache_usage_ratio"):
                await asyncio.sleep(0.001)
        stack.executor.gate.clear()
        text = generate_latest(stack.registry).decode()
        stack.executor.gate.set()
        running.cancel()
        samples = {
            sample.name: sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }
        for theirs, ours in NAMES.items():
            found = samples[f"vllm:{theirs}"]
            assert found.labels == {"model_name": "fake", "engine": "0"}
            assert found.value == samples[f"kvkeep_scheduler_{ours}"].value, theirs
        assert 0 < samples["vllm:kv_cache_usage_perc"].value < 1
        assert samples["vllm:num_requests_running"].value == 1
        assert samples["vllm:request_success_total"].labels["finished_reason"] == "length"
        assert samples["vllm:request_success_total"].value == 2
        config = samples["vllm:cache_config_info"]
        assert config.value == 1
        assert (config.labels["block_size"], config.labels["num_gpu_blocks"]) == ("4", "100")
        adapters = samples["vllm:lora_requests_info"]
        assert adapters.labels == {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        assert adapters.value >= started
        assert {family.name for family in text_string_to_metric_families(text) if "vllm" in family.name} >= {
            "vllm:time_to_first_token_seconds", "vllm:prefix_cache_hits"
        }  # fmt: skip


async def test_without_the_setting_there_are_no_vllm_metrics(stack: Stack) -> None:
    assert "vllm" not in generate_latest(stack.registry).decode()
