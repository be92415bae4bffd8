"""A Ray fleet of two nodes with real engines, which one command starts: its tokens are those of one engine."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator

import pytest

from executor.settings import ExecutorSettings
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.patience import patience
from tests.support.ray_cluster import HOSTS, RayFleet, ray_cluster

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = [[1000 + 7 * number + step for step in range(40)] for number in range(20)]
TOKENS = 24


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    """It sends requests to each engine in turn, and computes each token alike in every batch."""
    settings = {"executor_max_tokens": 4096, "executor_dtype": "float32", "executor_batch_invariant": 1}
    with ray_cluster(**settings, router_policy="round-robin") as running:
        model = str(ExecutorSettings.model_fields["model"].default)
        ports = str(running.plan.first_port)
        status, out, err = running.run(
            "--engines", "2", "--shards", "2", "--model", model, "--first-port", ports, KVKEEP_EXECUTOR_MODEL="none"
        )
        assert (status, "the fleet is ready" in out) == (0, True), out + err
        running.wait_until_whole(2)
        yield running


def ask(address: str, *, reuse: bool, concurrency: int) -> list[list[int]]:
    requests = [greedy_request(prompt, TOKENS, reuse=reuse) for prompt in PROMPTS]
    outputs: list[Output] = asyncio.run(generate_all(address, requests, concurrency=concurrency))
    return [output.token_ids for output in outputs]


def test_a_fleet_that_one_command_starts_answers_over_http(fleet: RayFleet) -> None:
    assert {fleet.host_of(f"engine-{number}", "scheduler_address") for number in range(2)} == set(HOSTS)
    body = {"model": "", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    address = fleet.say()["router-0"].addresses["router_http_address"]
    call = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=patience(60)) as answer:
        [choice] = json.load(answer)["choices"]
    assert "Paris" in choice["text"]


def test_greedy_output_through_the_router_is_that_of_one_engine(fleet: RayFleet) -> None:
    expected = ask(fleet.say()["engine-1"].addresses["scheduler_address"], reuse=False, concurrency=1)
    assert len({tuple(output) for output in expected}) == len(PROMPTS)
    # The second time with the blocks that were cached the first time.
    for _ in range(2):
        assert ask(fleet.router, reuse=True, concurrency=len(PROMPTS)) == expected
