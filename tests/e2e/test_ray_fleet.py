"""A fleet on a Ray cluster of two nodes: no request is lost while processes, actors and nodes come and go."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from operator import sub
from pathlib import Path

import grpc
import psutil
import pytest
import ray
import ray_fleet
import ray_member
from layout import LayoutError

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import ROOT, metrics
from tests.support.exact_stub import expected_tokens
from tests.support.generation import Output, generate, generate_all, greedy_request
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.ray_cluster import HOSTS, STUB, RayFleet, StubMember

pytestmark = pytest.mark.timeout(600)

PROMPTS = [[1000 + 7 * number + step for step in range(40)] for number in range(20)]
# With steps of 20 ms a request takes two seconds.
TOKENS, STEP_MICROSECONDS = 100, 20_000
EXPECTED = [expected_tokens(prompt, TOKENS) for prompt in PROMPTS]
STREAMS = 16
# Ray listens where other machines reach it, and would write a token of its own into the home of the user.
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(), "RAY_USAGE_STATS_ENABLED": "0"}
SECONDS = patience(60)


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    # Unix socket paths are short.
    folder = Path(tempfile.mkdtemp(prefix="kvk-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY.items():
            patch.setenv(name, value)
        patch.setattr("ray_fleet.Member", StubMember)
        running = RayFleet(folder, executor_max_tokens=16_384, router_policy="round-robin")
        try:
            running.scale(2)
            running.wait_until_whole(2)
            yield running
        finally:
            running.stop()
            shutil.rmtree(folder, ignore_errors=True)


def request(number: int) -> pb.StreamGenerateRequest:
    return greedy_request(PROMPTS[number], TOKENS, sampling=pb.SamplingParams(seed=STEP_MICROSECONDS))


async def _ask_while(router: str, work: Callable[[], None]) -> list[tuple[int, Output]]:
    answers: list[tuple[int, Output]] = []
    begun, done = [asyncio.Event() for _ in range(STREAMS)], asyncio.Event()

    async def ask(stub: rpc.GenerationServiceAsyncStub, number: int) -> None:
        while not done.is_set():
            answers.append((number, await generate(stub, request(number), SECONDS, begun[number])))

    async with grpc.aio.insecure_channel(router) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        tasks = [asyncio.create_task(ask(stub, number)) for number in range(STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        try:
            await asyncio.to_thread(work)
        finally:
            done.set()
        await asyncio.gather(*tasks)
    return answers


def check_while(fleet: RayFleet, work: Callable[[], None]) -> None:
    """Requests that run from before some work until after it get all their tokens, and the right ones."""
    begin = time.monotonic()
    answers = asyncio.run(_ask_while(fleet.router, work))
    pauses = (max(map(sub, output.token_times[1:], output.token_times)) for _, output in answers)
    print(f"{len(answers)} requests in {time.monotonic() - begin:.1f} s, the longest pause {max(pauses):.1f} s")
    assert len(answers) >= STREAMS
    assert [number for number, output in answers if output.token_ids != EXPECTED[number]] == []


def continued(fleet: RayFleet) -> float:
    """Requests that have moved from one engine to another so far."""
    samples = metrics(fleet.say()["router-0"].addresses["router_metrics_address"])
    return sum(value for name, _, value in samples if name == "kvkeep_router_continued_requests_total")


def reserved(resource: str) -> float:
    """What Ray has reserved for members, of all nodes."""
    return ray.cluster_resources()[resource] - ray.available_resources().get(resource, 0.0)


def command(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """`python -m ops.ray_fleet` in the checkout."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    return subprocess.Popen(
        [sys.executable, "-m", "ops.ray_fleet", *arguments],
        cwd=ROOT,
        env=own | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def run(fleet: RayFleet, *arguments: str, **changes: str) -> tuple[int, str, str]:
    """The command with the settings of the fleet that runs; its status and what it wrote."""
    environ = dict(fleet.plan.settings) | {"RAY_ADDRESS": fleet.cluster.address} | changes
    with command(*arguments, **environ) as program:
        out, err = program.communicate(timeout=SECONDS)
        return program.returncode, out, err


def test_members_are_spread_over_nodes_and_all_engines_answer(fleet: RayFleet) -> None:
    said = fleet.say()
    assert list(said) == ["cachemgr-0", "engine-0", "engine-1", "router-0"]
    assert set(said["engine-0"].addresses) == {
        "scheduler_address",
        "scheduler_metrics_address",
        "executor_metrics_address",
    }
    assert {fleet.host_of(name, "scheduler_address") for name in ("engine-0", "engine-1")} == set(HOSTS)
    memory = 2 * fleet.plan.memory * ray_member.GIB
    fleet.wait_until(lambda: reserved("memory") == memory, "Ray has not reserved the memory of both engines")
    outputs = asyncio.run(generate_all(fleet.router, map(request, range(len(PROMPTS))), concurrency=len(PROMPTS)))
    assert [output.token_ids for output in outputs] == EXPECTED


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (STUB, {"executor_executor_id": "executor-1"}),
        ("scheduler", {"scheduler_scheduler_id": "scheduler-0"}),
        ("cachemgr", {}),
    ],
)
def test_a_killed_process_is_started_again(fleet: RayFleet, module: str, settings: dict[str, str]) -> None:
    def kill() -> None:
        before = fleet.process(module, **settings)
        assert before is not None
        before.kill()
        fleet.wait_until(lambda: fleet.process(module, **settings) not in (None, before), "there is no new one")
        fleet.wait_until_whole(2)

    check_while(fleet, kill)


def test_a_killed_actor_takes_its_processes_along_and_is_started_anew(fleet: RayFleet) -> None:
    def kill() -> None:
        before = fleet.process(STUB, executor_executor_id="executor-0")
        assert before is not None
        before.parent().kill()
        before.wait(SECONDS)
        fleet.wait_until(lambda: fleet.process(STUB, executor_executor_id="executor-0"), "there is no new one")
        fleet.wait_until_whole(2)

    check_while(fleet, kill)


def test_engines_come_and_go(fleet: RayFleet) -> None:
    def scale() -> None:
        for engines in (4, 3, 2):
            fleet.scale(engines)
            assert f"engine-{engines}" not in ray_member.members()
            fleet.wait_until_whole(engines)

    check_while(fleet, scale)
    for number in (2, 3):
        assert fleet.process(STUB, executor_executor_id=f"executor-{number}") is None


def test_an_engine_that_answers_late_drains_before_it_ends(fleet: RayFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams end there."""
    fleet.scale(3)
    fleet.wait_until_whole(3)
    before = continued(fleet)

    def remove() -> None:
        with monkeypatch.context() as patch:
            # No member answers so soon.
            patch.setattr(ray_member, "ANSWER_SECONDS", 0.0)
            ray_fleet.stop(["engine-2"])
        fleet.wait_until_whole(2)

    check_while(fleet, remove)
    assert continued(fleet) == before


def test_members_that_come_or_go_meanwhile_are_no_fault(fleet: RayFleet) -> None:
    with pytest.raises(LayoutError, match="another command starts engine-0: "):
        ray_fleet.start("engine-0", fleet.plan)
    before = ray_member.members()
    ray_fleet.stop(["engine-7"])
    assert ray_member.members() == before


def test_a_fleet_with_other_settings_is_refused_while_one_runs(fleet: RayFleet) -> None:
    status, out, err = run(fleet, "--engines", "3", "--first-port", "30000", KVKEEP_ROUTER_POLICY="cost")
    assert status == 1
    assert "other settings (KVKEEP_ROUTER_POLICY, first_port, memory)" in err
    assert "--stop" in err
    assert "ready" not in out
    assert len(ray_member.members()) == 4


def test_members_of_a_lost_node_start_on_another(fleet: RayFleet) -> None:
    router = fleet.router.partition(":")[0]
    [lost] = set(HOSTS) - {router}

    def lose() -> None:
        fleet.lose(lost)
        fleet.wait_until(lambda: lost not in str(fleet.say()), "members are there still")
        fleet.wait_until_whole(2)

    check_while(fleet, lose)
    assert {fleet.host_of(name, "scheduler_address") for name in ("engine-0", "engine-1")} == {router}


def test_the_fleet_is_stopped_in_order(fleet: RayFleet) -> None:
    status, out, err = run(fleet, "--stop")
    assert status == 0, err
    assert [line for line in out.splitlines() if line.startswith("stopping")] == [
        "stopping router-0",
        "stopping engine-0, engine-1",
        "stopping cachemgr-0",
    ]
    assert ray_member.members() == []
    with pytest.raises(LayoutError, match="another command has ended the fleet"):
        ray_fleet.wait_until_ready()
    for module in ("scheduler.router", "scheduler", STUB, "cachemgr"):
        assert fleet.process(module) is None


@pytest.mark.model
def test_without_a_cluster_the_fleet_ends_with_ctrl_c(tmp_path: Path) -> None:
    port = free_address().rpartition(":")[2]
    environ = RAY | {"RAY_ADDRESS": "local", "KVKEEP_STATE_DIR": str(tmp_path), "PYTHONFAULTHANDLER": "1"}
    with command("--engines", "1", "--first-port", port, KVKEEP_EXECUTOR_MAX_TOKENS="1024", **environ) as program:
        try:
            lines = []
            for line in program.stdout:
                lines.append(line)
                if line.startswith("Ctrl-C"):
                    break
            router = f"127.0.0.2:{port}"
            assert any(f"KVCTL_ROUTER={router}" in line for line in lines), lines
            [output] = asyncio.run(generate_all(router, [greedy_request(PROMPTS[0], 4)], concurrency=1))
            assert len(output.token_ids) == 4
            children = psutil.Process(program.pid).children(recursive=True)
            assert children
            # As a terminal does, to all that it has started.
            os.killpg(program.pid, signal.SIGINT)
            # Reads what Ray says meanwhile: a full pipe would keep the program from its end.
            try:
                said = program.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                # It says where it stands.
                program.send_signal(signal.SIGABRT)
                said = program.communicate()
            assert program.returncode == 0, said
            _, alive = psutil.wait_procs(children, SECONDS)
            assert alive == []
        finally:
            program.kill()
