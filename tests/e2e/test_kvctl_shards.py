"""kvctl over a real fleet: two cache managers in one Redis behind a router, and what each has after it was killed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from redis import Redis

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import FleetStack
from tests.support.kvctl import Kvctl
from tests.support.patience import patience
from tests.support.ports import free_address

pytestmark = pytest.mark.model

BLOCK = 16


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetStack]:
    with FleetStack(
        engines=2,
        shards=2,
        executor_max_tokens=2048,
        router_policy="round-robin",
        router_metrics_address=free_address(),
    ) as running:
        yield running


@pytest.fixture
def kvctl(fleet: FleetStack, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvctl:
    made = Kvctl(fleet, capfd, monkeypatch)
    monkeypatch.delenv("KVCTL_SERVER")
    monkeypatch.setenv("KVCTL_ROUTER", fleet.scheduler)
    monkeypatch.setenv("KVKEEP_ROUTER_METRICS_ADDRESS", fleet.router_metrics)
    deadline = time.monotonic() + patience(60)
    while not all(one["ready"] and one["view_complete"] for one in made.data("engines")["engines"]):
        assert time.monotonic() < deadline, fleet.logs()
        time.sleep(0.1)
    return made


def generate(address: str, seed: int, salt: str, max_tokens: int = 1) -> pb.Usage:
    """Leaves three blocks of a prompt."""
    rng = random.Random(seed)
    tokens = pb.TokenIds(token_ids=[rng.randrange(1000, 40_000) for _ in range(3 * BLOCK)])
    request = pb.StreamGenerateRequest(
        token_ids=tokens, max_tokens=max_tokens, ignore_eos=True, cache=pb.CacheOptions(salt=salt)
    )
    with grpc.insecure_channel(address) as channel:
        stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
        *_, last = stub.StreamGenerate(request, timeout=patience(60))
        return last.usage


def steered(kvctl: Kvctl) -> dict[str, Any]:
    """What operators and requests have left in each shard, without ages."""
    rules, quotas, blocks = (
        kvctl.data(*line)["shards"] for line in (("rules", "list"), ("quota", "list"), ("blocks", "--salt", "kept"))
    )
    return {
        shard: (
            rules[shard]["rules"],
            quotas[shard]["quotas"],
            [(one["pool_id"], one["key"]) for one in blocks[shard]["blocks"]],
        )
        for shard in rules
    }


def settled(kvctl: Kvctl) -> None:
    """Waits until blocks are released, which a sync after the last answer does."""
    while any(shard["sequences"] for shard in kvctl.data("sequences")["shards"].values()):
        time.sleep(0.05)


def test_a_fleet_is_seen_and_steered_as_one(fleet: FleetStack, kvctl: Kvctl) -> None:
    first, second = (fleet.address(f"scheduler-{number}") for number in range(2))
    engines = kvctl.data("engines")["engines"]
    assert {one["address"] for one in engines} == {first, second}
    shards = sorted(one["cachemgr_admin_address"] for one in engines)
    rows = [row.split() for row in kvctl.text("pools").splitlines()[1:]]
    assert sorted(row[0] for row in rows) == shards
    assert sorted(row[1] for row in rows) == ["executor-0/0", "executor-1/0"]
    for seed in range(4):
        generate(fleet.scheduler, seed, "kept")
    settled(kvctl)
    sent = [int(one["routed_requests"]) for one in kvctl.data("engines")["engines"]]
    assert sum(sent) >= 4
    assert all(sent)
    assert kvctl.text("quota", "set", "--salt", "kept", "--device-floor", 1).count("set the quota") == 2
    assert kvctl.text("rules", "set", "kept", "--salt", "kept", "--priority", 80).count("made rule") == 2
    assert kvctl.text("fsck").count("clean, and Redis agrees") == 2
    assert {row["status"] for row in kvctl.data("ping")["services"]} == {"serving"}
    assert "executor-1/0" in kvctl.text("top", "--once", "--interval", 0.1)


def test_the_screen_has_step_times_of_each_engine_and_rates_of_the_router(fleet: FleetStack, kvctl: Kvctl) -> None:
    wanted = {"steps_per_second", "output_tokens_per_second", "inter_token_latency_seconds"}
    deadline, measured = time.monotonic() + patience(60), set[str]()
    with ThreadPoolExecutor(2) as threads:
        while not measured >= wanted:
            assert time.monotonic() < deadline, measured
            asked = [threads.submit(generate, fleet.scheduler, seed, "timed", 32) for seed in (700, 701)]
            found = kvctl.data("top", "--interval", 0.5)
            measured = {name for name, value in found["rates"].items() if value}
            for one in asked:
                one.result()
    found = kvctl.data("top", "--interval", 0.1)
    assert found["trouble"] == []
    assert [float(one["loads"]["step_time"].removesuffix("s")) > 0 for one in found["engines"]] == [True, True]
    shown = kvctl.text("top", "--once", "--interval", 0.1).splitlines()
    head = next(number for number, line in enumerate(shown) if " step " in line and " sent " in line)
    assert all(" ms " in line for line in shown[head + 1 : head + 3]), shown


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_cache_manager_finds_its_own_records_and_no_other(
    fleet: FleetStack, kvctl: Kvctl, number: int
) -> None:
    # Two of each shard: of prompts that no test before has sent.
    for seed in range(4):
        generate(fleet.scheduler, 100 * (number + 1) + seed, "kept")
    settled(kvctl)
    if not kvctl.data("rules", "list")["shards"].popitem()[1]["rules"]:
        kvctl.text("rules", "set", "kept", "--salt", "kept", "--priority", 80)
        kvctl.text("quota", "set", "--salt", "kept", "--device-floor", 1)
    kvctl.text("fsck")
    before = steered(kvctl)
    assert all(blocks for _, _, blocks in before.values())
    name = f"cachemgr-{number}"
    fleet.kill(name)
    gone, left = kvctl.run("pools", "--timeout", 2), 1 - number
    assert (gone.status, f"executor-{left}/0" in gone.out) == (3, True)
    assert "no answer" in gone.err
    fleet.start(name)
    fleet.wait_until_serving(name)
    deadline = time.monotonic() + patience(60)
    while True:
        done = kvctl.run("pools")
        if done.status == 0 and done.out.count("executor-") == 2:
            break
        assert time.monotonic() < deadline, done
        time.sleep(0.1)
    while steered(kvctl) != before:
        assert time.monotonic() < deadline, (steered(kvctl), before)
        time.sleep(0.1)
    assert kvctl.text("fsck").count("clean, and Redis agrees") == 2


def test_the_keys_of_two_shards_are_apart(fleet: FleetStack, kvctl: Kvctl) -> None:
    url = str(fleet.own["cachemgr-0"]["redis_url"])
    with Redis.from_url(url) as redis:
        names = {key.decode() for key in redis.scan_iter("kvkeep:*")}
    owners = {name.partition("{")[2].partition("}")[0] for name in names}
    assert owners >= {"operators", "executor-0", "1/operators", "1/executor-1"}
    assert not owners & {"executor-1", "1/executor-0"}


def test_an_engine_is_drained_by_its_name(fleet: FleetStack, kvctl: Kvctl) -> None:
    assert "admits no more requests" in kvctl.text("drain", "executor-1", "--yes")
    while sum(one["ready"] for one in kvctl.data("engines")["engines"]) != 1:
        time.sleep(0.05)
    before = {one["executor_id"]: int(one["routed_requests"]) for one in kvctl.data("engines")["engines"]}
    for seed in range(3):
        generate(fleet.scheduler, 500 + seed, "drained")
    after = {one["executor_id"]: int(one["routed_requests"]) for one in kvctl.data("engines")["engines"]}
    assert (after["executor-0"] - before["executor-0"], after["executor-1"]) == (3, before["executor-1"])
    kvctl.text("drain", "executor-1", "--undo")


def test_a_request_is_aborted_at_the_router_and_at_its_engine(fleet: FleetStack, kvctl: Kvctl) -> None:
    for name, options in (("at-router", ()), ("at-engine", ("--engine",))):
        with grpc.insecure_channel(fleet.scheduler) as channel:
            stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
            request = pb.StreamGenerateRequest(request_id=name, text="x", max_tokens=1000, ignore_eos=True)
            call = stub.StreamGenerate(request, timeout=patience(60))
            next(call)
            names = [one["executor_id"] for one in kvctl.data("engines")["engines"]]
            [engine] = [one for one in names if not kvctl.run("abort", name, "--engine", one, "--dry-run").status]
            done = kvctl.data("abort", name, "--yes", *options, *([engine] if options else ()))
            assert done == {"aborted_requests": 1}
            *_, last = call
            assert last.finish_reason == pb.FINISH_REASON_ABORT
