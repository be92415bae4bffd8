"""A fleet on a Ray cluster of two nodes: no request is lost while processes, actors and nodes come and go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import ray_fleet
import ray_member
from layout import LayoutError

from tests.stack import ROOT, metrics
from tests.support.generation import generate_all, greedy_request
from tests.support.kvctl import command as kvctl_command
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.ray_cluster import HOSTS, LOSSES, RAY, STUB, RayFleet, StubMember, command, ray_cluster
from tests.support.ray_load import EXPECTED, PROMPTS, STREAMS, ask_while, request

pytestmark = pytest.mark.timeout(600)

SECONDS = patience(60)


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    with (
        pytest.MonkeyPatch.context() as patch,
        ray_cluster(executor_max_tokens=16_384, router_policy="round-robin") as running,
    ):
        patch.setattr("ray_fleet.Member", StubMember)
        running.scale(2)
        running.wait_until_whole(2)
        yield running


def check_while(fleet: RayFleet, what: str, work: Callable[[], None]) -> None:
    """Requests that run from before some work until after it get all their tokens, and the right ones.

    Prints a row of the table in docs/ray.md. what: its first column. The work ends when the fleet is whole.
    """
    answers = ask_while(fleet, work)
    print(f"| {what} | {answers.pause:.1f} s | {answers.seconds:.1f} s |")
    assert answers.requests >= STREAMS
    assert (answers.wrong, answers.lost) == ([], [])


def continued(fleet: RayFleet) -> float:
    """Requests that have moved from one engine to another so far."""
    samples = metrics(fleet.say()["router-0"].addresses["router_metrics_address"])
    return sum(value for name, _, value in samples if name == "kvkeep_router_continued_requests_total")


def reserved(resource: str) -> float:
    """What Ray has reserved for members, of all nodes."""
    return ray.cluster_resources()[resource] - ray.available_resources().get(resource, 0.0)


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
    assert [output.token_ids for output in outputs] == EXPECTED[STUB]


def test_kvctl_and_the_console_see_all_of_the_fleet(fleet: RayFleet) -> None:
    said = fleet.say()
    engines = {said[f"engine-{number}"].addresses["scheduler_address"] for number in range(2)}
    shard = said["cachemgr-0"].addresses["cachemgr_admin_address"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KVKEEP_", "KVCTL_"))}
    own["KVCTL_ROUTER"] = fleet.router

    def kvctl(verb: str, key: str) -> list[dict[str, str]]:
        done = subprocess.run(
            kvctl_command(verb, "-o", "json"), env=own, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done
        listed: list[dict[str, str]] = json.loads(done.stdout)[key]
        return listed

    found = kvctl("engines", "engines")
    assert {one["address"] for one in found} == engines
    assert {one["cachemgr_admin_address"] for one in found} == {shard}
    services = [("router", fleet.router), *(("scheduler", one) for one in sorted(engines)), ("admin", shard)]
    asked = [(one["name"], one["address"]) for one in kvctl("ping", "services") if one["status"] == "serving"]
    assert sorted(one for one in asked if one[0] != "executor") == sorted(services)
    assert [name for name, _ in asked].count("executor") == 2
    page = free_address()
    line = [sys.executable, "-m", "kvctl.console"]
    with subprocess.Popen(
        line, env=own | {"KVKEEP_CONSOLE_ADDRESS": page}, cwd=ROOT, stderr=subprocess.PIPE
    ) as console:
        try:
            # It serves.
            assert console.stderr.readline()
            with urllib.request.urlopen(f"http://{page}/api/fleet", timeout=SECONDS) as answer:
                shown = json.load(answer)
            assert (shown["shards"], {one["address"] for one in shown["engines"]}) == ([shard], engines)
        finally:
            console.kill()


@pytest.mark.parametrize("what", LOSSES)
def test_a_killed_process_or_actor_is_started_again(fleet: RayFleet, what: str) -> None:
    check_while(fleet, what, lambda: LOSSES[what](fleet))


def test_engines_come_and_go(fleet: RayFleet) -> None:
    def scale() -> None:
        for engines in (4, 3, 2):
            fleet.scale(engines)
            assert f"engine-{engines}" not in ray_member.members()
            fleet.wait_until_whole(engines)

    check_while(fleet, "two engines start, then end one after the other", scale)
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

    check_while(fleet, "an engine that answers late ends", remove)
    assert continued(fleet) == before


def test_members_that_come_or_go_meanwhile_are_no_fault(fleet: RayFleet) -> None:
    with pytest.raises(LayoutError, match="another command starts engine-0: "):
        ray_fleet.start("engine-0", fleet.plan)
    before = ray_member.members()
    ray_fleet.stop(["engine-7"])
    assert ray_member.members() == before


def test_a_fleet_with_other_settings_is_refused_while_one_runs(fleet: RayFleet) -> None:
    status, out, err = fleet.run("--engines", "3", "--first-port", "30000", KVKEEP_ROUTER_POLICY="cost")
    assert status == 1
    assert "other settings (KVKEEP_ROUTER_POLICY, first_port, memory)" in err
    assert "--stop" in err
    assert "ready" not in out
    assert len(ray_member.members()) == 4


def test_members_of_a_lost_node_start_on_another(fleet: RayFleet) -> None:
    router = fleet.router.partition(":")[0]
    [lost] = set(HOSTS) - {router}
    for _ in range(10):
        if "engine" in str(there := fleet.members_on(lost)):
            break
        # Ray places each new engine on another node than the engine before.
        fleet.scale(1)
        fleet.wait_until_whole(1)
        fleet.scale(2)
        fleet.wait_until_whole(2)
    assert "engine" in str(there)

    check_while(fleet, f"a node with {', '.join(there)}", lambda: fleet.lose(lost))
    assert {fleet.host_of(name, "scheduler_address") for name in ("engine-0", "engine-1")} == {router}


def test_the_fleet_is_stopped_in_order(fleet: RayFleet) -> None:
    status, out, err = fleet.run("--stop")
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
