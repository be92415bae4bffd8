"""All policies of a fleet get the same requests, its simulation adds up, and its stub executors act as real ones."""

import asyncio
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.__main__ import cells, main, measured, record, show, simulate
from bench.fleet.bounds import PLACED, PLACEMENTS, Cache, Device, Simulation, simulated
from bench.fleet.client import Ask
from bench.fleet.processes import DIRECT, Load, Measured
from bench.fleet.workload import Groups, Request, Stage, Trace
from bench.result import read
from bench.stub_executor import TOKEN_BYTES, StubSettings
from protos.generation.v1 import generation_pb2_grpc as rpc
from scheduler.router.policies import POLICIES
from tests.stack import ROOT, Stack
from tests.support.generation import Output, generate, greedy_request
from tests.support.patience import patience

GROUPS = Groups(groups=6, users=2, prefix_tokens=100, question_tokens=10, output_tokens=3)
DEVICE = Device(
    step_seconds=0.05, prefill_rate=1_000, pool_tokens=350, max_batched_tokens=64, max_running=4, max_waiting=3
)


def stages() -> list[Stage]:
    return list(GROUPS.stages([2, 8], seconds=10, cold_rate=4))


def test_requests_are_the_same_each_time_and_questions_are_new() -> None:
    assert stages() == stages()
    prompts = [tuple(request.tokens()) for stage in stages() for request in stage.requests]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {110}
    assert len({prompt[:100] for prompt in prompts}) == 6
    assert len({prompt[:16] for prompt in prompts}) == 6


def test_a_burst_is_a_new_group_in_each_stage_and_changes_no_other_request() -> None:
    bursts = []
    for stage, plain in zip(replace(GROUPS, burst=5).stages([2, 8], seconds=10, cold_rate=4), stages(), strict=True):
        burst = [one for one in stage.requests if one not in plain.requests]
        assert [one for one in stage.requests if one not in burst] == plain.requests
        assert [one.at for one in stage.requests] == sorted(one.at for one in stage.requests)
        bursts.append(burst)
    cold, *both = bursts
    assert cold == []
    assert [len(burst) for burst in both] == [5, 5]
    for burst in both:
        assert burst[-1].at - burst[0].at <= 1
        assert len({one.session for one in burst}) == 5
    everything = [one for stage in stages() for one in stage.requests] + both[0] + both[1]
    # Six groups and two bursts; no two prompts are equal.
    assert len({tuple(one.tokens())[:100] for one in everything}) == 8
    assert len({tuple(one.tokens()) for one in everything}) == len(everything)


def test_the_figures_of_a_burst_stand_apart() -> None:
    *_, stage = replace(GROUPS, burst=6).stages([2], seconds=10, cold_rate=4)
    [one] = simulate(simulated("cost"), DEVICE, 2, [stage])
    assert one["burst"]["requests"] == 6
    assert one["requests"] == len(stage.requests) > 6
    # Cached on one engine, after the first, or on both.
    assert one["burst"]["hit_rate"] > 0
    assert "its burst" in show([one], "requests/s")


def test_requests_reach_the_client_as_they_are() -> None:
    ask = Ask(["unix:/a"], stages()[1].requests, 1.0, 10.0)
    assert Ask.parse(ask.dump()) == ask


def test_a_trace_keeps_its_shared_beginnings_when_it_is_made_smaller(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at, "input_length": length, "output_length": 40, "hash_ids": ids}
        for at, length, ids in ((0, 1000, [7, 8]), (4000, 1300, [7, 8, 9]), (90_000, 512, [7]))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    slow, fast = Trace(path, scale=4).stages([1, 2], seconds=20)
    first, second = slow.requests
    assert (len(first.tokens()), len(second.tokens()), second.output_tokens) == (250, 325, 10)
    # All but the rest of the first one's last block, which is longer in the second.
    assert second.tokens()[:250] == first.tokens()
    assert [one.at for one in slow.requests] == [0, 1]
    assert [one.at for one in fast.requests] == [0, 0.5]


def alone(contents: tuple[tuple[int, int], ...] = ((1, 100), (2, 10)), at: float = 0.0) -> Request:
    return Request(at, "g", "g", contents, 3)


def test_a_request_alone_takes_its_steps() -> None:
    simulation = Simulation(DEVICE, 1, lambda *_: 0)
    # 64 and 46 tokens, then two decodes.
    [answer] = simulation.run([alone()], (0, 10))
    assert answer.first == pytest.approx(0.064 + 0.05)
    assert answer.last == pytest.approx(0.064 + 0.05 + 2 * 0.05)
    # Its prefix is cached now.
    [again] = simulation.run([alone(((1, 100), (3, 10)))], (0, 0.06))
    assert (again.cached_tokens, again.counted) == (100, 1)
    assert again.first == pytest.approx(0.05)


def test_one_engine_for_each_group_finds_more_than_engines_in_turn() -> None:
    requests = [request for stage in stages() for request in stage.requests]
    cached = {}
    for name, placement in PLACEMENTS.items():
        simulation = Simulation(DEVICE, 2, placement(requests, 2))
        answers = [one for stage in stages() for one in simulation.run(stage.requests, (0, 10))]
        assert {one.output_tokens for one in answers if one.code == "OK"} == {3}
        cached[name] = sum(one.cached_tokens for one in answers)
    assert cached[PLACED] > 1.2 * cached[simulated("round-robin")]


def test_prompts_that_no_engine_has_go_to_engines_in_turn_from_stage_to_stage() -> None:
    simulation = Simulation(DEVICE, 2, PLACEMENTS[simulated("least-load")]([], 2))
    chosen = []
    for stage, times in enumerate(((1, 8, 9), (1, 2, 3))):
        requests = [alone(((10 * stage + at, 100),), at) for at in times]
        chosen += [answer.target for answer in simulation.run(requests, (0, 10))]
    assert chosen == [0, 1, 0, 1, 0, 1]


def test_a_policy_knows_nothing_of_the_stages_before_a_cold_one() -> None:
    # With its earlier requests, the policy `prefix` would send both groups of the second stage to one engine.
    stages = [
        Stage(str(groups), [alone(((group, 100),), at=group) for group in groups], 10.0, cold=True)
        for groups in ((1, 2, 3, 4), (1, 3))
    ]
    found = simulate(simulated("prefix"), DEVICE, 2, stages)
    assert [one["most_by_mean"] for one in found] == [1, 1]


def test_simulations_alone_leave_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "simulated.json"
    options = ["--smoke", "--simulated", "--engines", "3", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["bench fleet", *options])
    assert main() == 0
    found = read(written)
    assert found["settings"]["engines"] == 3
    # Of the asked policies only, `direct` being engines in turn.
    policies = (PLACED, simulated("round-robin"), simulated("cost"))
    assert [(one["policy"], one["rate"]) for one in found["stages"]] == [
        (policy, rate) for policy in policies for rate in ("cold", "10")
    ]
    assert {one["failed"] for one in found["stages"]} == {0}
    assert all(1 <= one["most_by_mean"] <= 3 for one in found["stages"])


def test_a_cache_drops_what_was_used_longest_ago() -> None:
    cache = Cache(300)
    for content in (1, 2, 3, 1, 4):
        request = alone(((content, 99),))
        cache.admit(request)
        cache.release(request)
    assert [cache.cached(alone(((content, 99),))) for content in (1, 2, 3, 4)] == [98, 0, 98, 98]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 120), st.integers(0, 5)), max_size=60))
def test_a_cache_never_holds_more_than_its_blocks_and_keeps_running_ones(
    operations: list[tuple[int, int, int]],
) -> None:
    cache, running = Cache(300), list[Request]()
    for number, (prefix, tokens, ending) in enumerate(operations):
        request = alone(((prefix, 100), (100 + number, tokens)))
        seen = cache.admit(request)
        if seen is None:
            assert running
        else:
            running.append(request)
            assert seen <= 100
        assert cache.used_tokens <= cache.kept_tokens <= 300
        for one in running:
            # Everything of a running request is there.
            assert cache.cached(one) == one.prompt_tokens - 1
        if ending < len(running):
            cache.release(running.pop(ending))


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 5)), min_size=1, max_size=60),
    st.integers(1, 3),
)
def test_every_simulated_request_is_answered_or_refused(arrivals: list[tuple[float, int]], engines: int) -> None:
    requests = [alone(((group, 100), (100 + number, 10)), at) for number, (at, group) in enumerate(sorted(arrivals))]
    numbers = itertools.cycle(range(engines))
    for answer in Simulation(DEVICE, engines, lambda *_: next(numbers)).run(requests, (0, 100)):
        if answer.code == "OK":
            assert answer.first is not None
            assert answer.last is not None
            assert answer.due + 0.05 <= answer.first + 1e-9
            assert answer.last - answer.first >= 2 * 0.05 - 1e-9
            assert answer.output_tokens == answer.counted == 3
        else:
            assert (answer.code, answer.output_tokens, answer.first) == ("RESOURCE_EXHAUSTED", 0, None)


def test_a_small_fleet_is_measured(tmp_path: Path) -> None:
    written = tmp_path / "fleet.json"
    options = ["--smoke", "--routers", "2", "--policies", DIRECT, "cost"]
    command = [sys.executable, "-m", "bench", "fleet", *options, "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stderr
    found = {(one["policy"], one["rate"]): one for one in read(written)["stages"]}
    for rate in ("cold", "10"):
        stage, expected = found[DIRECT, rate], found[simulated("round-robin"), rate]
        assert stage["requests"] == expected["requests"] == sum(stage["by_engine"].values())
        assert stage["failed"] == 0
    routed = found["cost", "10"]
    assert routed["failed"] == 0
    # A busy machine refuses requests, and then caches different requests.
    if not any(stage["shed"] for stage in (found[DIRECT, "cold"], found[DIRECT, "10"], routed)):
        for rate in ("cold", "10"):
            # Only whole blocks are cached, and the contents of the pool depend a little on when requests end.
            expected = found[simulated("round-robin"), rate]["hit_rate"]
            assert found[DIRECT, rate]["hit_rate"] == pytest.approx(expected, abs=0.15)
        assert found[DIRECT, "10"]["hit_rate"] > found[DIRECT, "cold"]["hit_rate"]
        assert routed["hit_rate"] > found[DIRECT, "10"]["hit_rate"]
    processes = {"cachemgr", "executor", "scheduler", "redis", "client"}
    assert processes <= found[DIRECT, "10"]["cpu_s_per_s"].keys()
    assert sum(routed["by_engine"].values()) == routed["decisions"] == routed["requests"]
    assert routed["routed_tokens"] >= routed["expected_cached_tokens"] > 0
    assert processes | {"router"} <= routed["cpu_s_per_s"].keys()
    assert 0 <= routed["regret"] <= 1
    assert 1 <= routed["most_by_mean"] <= 2
    assert "regret" not in found[DIRECT, "10"]
    assert "output tokens/s / TTFT p90 in s" in done.stdout


def test_a_stage_in_which_nothing_was_due_has_its_line() -> None:
    load = Load(machine=0.1, others=0.0, seconds=1.0, cpu={"client": 0.1}, busiest=0.1)
    stage = Stage("1", [], seconds=1.0)
    [one] = [record(stage, [], policy="cost", **measured(Measured([], load, 0.0, {"engine-0": 0.0}, {})))]
    assert (one["requests"], one["late_p99_s"], one["most_by_mean"]) == (0, 0.0, 0.0)
    assert "0 of 0" in cells(one)


@pytest.mark.parametrize("rate", [2.0, 4.0])
def test_streams_behind_one_common_prompt_spread_where_steps_grow_with_the_batch(rate: float) -> None:
    """No policy gives more tokens in a second, or less time between them, than `cost` but for a twentieth."""
    common = Groups(groups=1, prefix_tokens=1_000, question_tokens=32, output_tokens=200)
    device = Device(0.05, 4_000, 300_000, 512, 64, 16, sequence_seconds=0.002)
    _, stage = common.stages([rate], seconds=40, cold_rate=4)
    found = {name: next(iter(simulate(simulated(name), device, 4, [stage]))) for name in POLICIES}
    for name in ("output_tokens_per_s", "itl_mean_s"):
        values = {policy: one[name] for policy, one in found.items()}
        if name == "itl_mean_s":
            assert values["cost"] <= 1.05 * min(values.values()), values
        else:
            assert values["cost"] >= 0.95 * max(values.values()), values


def test_a_step_of_a_stub_takes_the_time_of_its_prompts_or_of_its_decodes() -> None:
    stub = StubSettings(stub_step_seconds=0.05, stub_prefill_rate=1_000)
    assert [stub.seconds(*step) for step in ((0, 8, 7), (40, 48, 7), (200, 208, 7), (0, 0, 7))] == [0.05, 0.05, 0.2, 0]
    # Each sequence that decodes adds to it.
    growing = StubSettings(stub_step_seconds=0.05, stub_prefill_rate=1_000, stub_sequence_seconds=0.01)
    assert [growing.seconds(*step) for step in ((0, 8, 7), (200, 208, 7), (0, 0, 7))] == pytest.approx([0.13, 0.28, 0])
    # The seed says it, in microseconds, and prompts are free.
    assert StubSettings().seconds(200, 208, 2_000) == 0.002


def test_a_stub_executor_offloads_to_its_host_tier_and_onloads_from_it() -> None:
    modules = {"cachemgr": "cachemgr", "executor": "bench.stub_executor", "scheduler": "scheduler"}
    settings = {
        "executor_max_tokens": 640,
        "executor_host_cache_size": 100 * 16 * TOKEN_BYTES,
        "executor_stub_step_seconds": 0.002,
        "executor_stub_prefill_rate": 10_000,
        "cachemgr_ghost_sample": 0,
    }

    async def ask(address: str) -> list[Output]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
            # Each fills more than half of the device.
            prompts = [alone(((content, 400),)).tokens() for content in (1, 2, 3, 1)]
            return [await generate(stub, greedy_request(prompt, 4)) for prompt in prompts]

    with Stack(modules=modules, **settings) as stack:
        outputs = asyncio.run(ask(stack.scheduler))
    assert [len(output.token_ids) for output in outputs] == [4] * 4
    assert [output.usage.cached_tokens for output in outputs[:3]] == [0, 0, 0]
    assert outputs[3].usage.cached_tokens >= 384
    assert outputs[3].usage.host_tokens > 0
