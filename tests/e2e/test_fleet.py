"""Two real engines with a cache manager each, behind a router: whatever is killed, tokens equal those of one engine."""

import asyncio
import time
from collections.abc import Iterator, Sequence

import grpc
import pytest

from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import FleetStack, metrics
from tests.support.generation import Output, generate, generate_all, greedy_request
from tests.support.patience import patience
from tests.support.ports import free_address

pytestmark = pytest.mark.model

PROMPTS = [[1000 + 7 * number + step for step in range(40)] for number in range(6)]
LONG = 96


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetStack]:
    """It sends requests to each engine in turn, and computes each token alike in every batch."""
    with FleetStack(
        engines=2,
        shards=2,
        executor_max_tokens=4096,
        executor_batch_invariant=1,
        router_policy="round-robin",
        router_metrics_address=free_address(),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(fleet: FleetStack) -> list[list[int]]:
    """What the second engine answers by itself."""
    engine = fleet.address("scheduler-1")
    assert engine is not None
    requests = [greedy_request(prompt, LONG, reuse=False) for prompt in PROMPTS]
    outputs = asyncio.run(generate_all(engine, requests, concurrency=1))
    assert len({tuple(output.token_ids) for output in outputs}) == len(PROMPTS)
    return ids(outputs)


def ids(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def routed(fleet: FleetStack) -> dict[str, float]:
    """Requests of each engine so far, once both take some."""
    deadline = time.monotonic() + patience(60)
    while True:
        samples = list(metrics(fleet.router_metrics))
        if ("kvkeep_router_engines", 'state="ready"', 2.0) in samples:
            return {labels: value for name, labels, value in samples if name == "kvkeep_router_routed_requests_total"}
        assert time.monotonic() < deadline, fleet.logs()
        time.sleep(0.1)


def test_greedy_output_through_the_router_is_that_of_one_engine(fleet: FleetStack, expected: list[list[int]]) -> None:
    # The second time with the blocks that were cached the first time.
    for _ in range(2):
        requests = [greedy_request(prompt, LONG) for prompt in PROMPTS]
        outputs = asyncio.run(generate_all(fleet.scheduler, requests, concurrency=len(PROMPTS)))
        assert ids(outputs) == expected
    assert len(routed(fleet)) == 2


@pytest.mark.parametrize("victim", ["executor-0", "scheduler-1", "executor-1", "scheduler-0", "cachemgr-1"])
def test_streams_go_on_with_the_same_tokens_when_a_process_is_killed(
    fleet: FleetStack, expected: list[list[int]], victim: str
) -> None:
    before = routed(fleet)

    async def ask() -> list[Output]:
        async with grpc.aio.insecure_channel(fleet.scheduler) as channel:
            stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
            begun = [asyncio.Event() for _ in PROMPTS]
            tasks = [
                asyncio.create_task(generate(stub, greedy_request(prompt, LONG), begun=event))
                for prompt, event in zip(PROMPTS, begun, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            fleet.kill(victim)
            assert not any(task.done() for task in tasks)
            fleet.start(victim)
            return await asyncio.gather(*tasks)

    assert ids(asyncio.run(ask())) == expected
    after = routed(fleet)
    assert all(after[engine] > before.get(engine, 0.0) for engine in after)
