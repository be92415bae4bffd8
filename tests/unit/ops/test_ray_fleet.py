"""What members of a fleet on Ray are told, before there is any Ray."""

import itertools
import socket
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import layout
import pytest
import ray_fleet
import ray_member
from layout import LayoutError, Process
from ray_member import FleetPlan, Status

from protos.rpc.addresses import AddressError, check_distinct
from protos.rpc.settings import SettingsError
from tests.support.ports import free_address

STATE = {"KVKEEP_STATE_DIR": "/state", "KVKEEP_EXECUTOR_MODEL": "tiny"}
PLAN = FleetPlan(STATE, shards=2, cpus=2, gpus=0, first_port=20_000)
SHARD = {"cachemgr_address": "10.0.0.7:1", "cachemgr_admin_address": "10.0.0.7:2"}
HOST = "10.0.0.9"


def make(name: str, plan: FleetPlan = PLAN, host: str = HOST, share: float = 1.0) -> list[Process]:
    plan = replace(plan, settings={**plan.settings, "KVKEEP_INSECURE": "1"})
    return ray_member.make_processes(name, plan, host, share=share, shard=SHARD)


def test_members_on_one_node_share_no_address_and_no_folder() -> None:
    names = [f"{kind}-{number}" for kind in ("cachemgr", "engine", "router") for number in range(12)]
    members = {name: make(name) for name in names}
    processes = list(itertools.chain(*members.values()))
    check_distinct({setting: address for _, setting, address in layout.listening(processes)})
    folders = {name: {one.settings.state_dir for one in member} for name, member in members.items()}
    assert folders == {name: {Path("/state", name)} for name in names}
    assert len({one.field("executor_id") for one in processes if one.kind == "executor"}) == 12


def test_an_engine_is_found_on_its_node_and_finds_its_shard() -> None:
    executor, scheduler = make("engine-3")
    for one in (executor, scheduler):
        assert {setting: one.field(setting) for setting in SHARD} == SHARD
    assert scheduler.field("scheduler_address").startswith("10.0.0.9:")
    assert scheduler.field("executor_address") == executor.field("executor_address")
    [shard] = make("cachemgr-1")
    assert shard.field("shard") == "1"
    assert all(address.startswith("10.0.0.9:") for address in shard.addresses)


def test_a_router_has_the_names_and_origins_of_schedulers_unless_it_has_its_own() -> None:
    settings = {
        "KVKEEP_SCHEDULER_SERVED_MODEL_NAMES": "a,b",
        "KVKEEP_SCHEDULER_HTTP_ALLOWED_ORIGINS": "https://chat.example.com",
        "KVKEEP_ROUTER_HTTP_ALLOWED_ORIGINS": "https://other.example.com",
    }
    [router] = make("router-0", replace(PLAN, settings={**STATE, **settings}))
    assert router.field("served_model_names") == str(("a", "b"))
    assert router.field("http_allowed_origins") == str(("https://other.example.com",))


def test_an_address_of_ipv6_has_brackets() -> None:
    [shard] = make("cachemgr-0", host="fd00::9")
    assert all(address.startswith("[fd00::9]:") for address in shard.addresses)


def test_an_engine_has_the_threads_and_the_memory_that_it_was_placed_for() -> None:
    assert make("engine-0")[0].field("threads") == "2"
    assert make("engine-0", replace(PLAN, cpus=0.5))[0].field("threads") == "1"
    assert float(make("engine-0", share=0.25)[0].field("free_memory_fraction")) == pytest.approx(0.9 / 4)
    node = {"CPU": 8.0, "memory": 64.0 * ray_member.GIB}
    assert ray_member.share_of(PLAN, node) == 0.25
    assert ray_member.share_of(replace(PLAN, memory=32), node) == 0.5
    assert ray_member.share_of(replace(PLAN, memory=32, gpus=0.25), node) == 0.25
    assert ray_member.share_of(replace(PLAN, gpus=2), node) == 1.0
    # A head may have no CPUs.
    assert ray_member.share_of(PLAN, {}) == 1.0


def test_an_engine_without_gpus_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert make("engine-0")[0].environ["CUDA_VISIBLE_DEVICES"] == ""
    # Ray has chosen it.
    assert make("engine-0", replace(PLAN, gpus=1))[0].environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_settings_of_a_node_are_not_those_of_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_EXECUTOR_MODEL", "another")
    assert make("engine-0")[0].field("model") == "tiny"


def test_what_differs_between_two_plans_is_named() -> None:
    other = replace(PLAN, settings={"KVKEEP_STATE_DIR": "/state", "KVKEEP_LOG_LEVEL": "debug"}, shards=3)
    assert PLAN.differences(other) == ["KVKEEP_EXECUTOR_MODEL", "KVKEEP_LOG_LEVEL", "shards"]
    assert PLAN.differences(replace(PLAN)) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--engine-gpus", "-1"),
        ("--engine-gpus", "nan"),
        ("--engine-memory", "-0.5"),
        ("--engine-memory", "inf"),
        ("--engine-cpus", "0"),
        ("--engine-cpus", "inf"),
        ("--routers", "0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_their_option(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ray_fleet", "--engines", "1", option, value])
    with pytest.raises(SystemExit):
        ray_fleet.parse()
    assert f"{option} must be" in capsys.readouterr().err.replace("--routers and --engine-cpus", option)


def asked(**options: object) -> Namespace:
    """The command line of a fleet."""
    given = {"model": None, "engines": 2, "shards": 2, "engine_cpus": 2.0, "engine_gpus": None, "engine_memory": 0.0}
    return Namespace(**given | {"first_port": 20_000} | options)


def test_a_model_on_the_command_line_is_that_of_all_members() -> None:
    environ = {**STATE, "PATH": "/bin"}
    assert ray_fleet.make_plan(asked(), environ, [], {}) == PLAN
    plan = ray_fleet.make_plan(asked(model="large"), environ, [], {})
    assert plan.differences(PLAN) == ["KVKEEP_EXECUTOR_MODEL"]
    assert make("engine-0", plan)[0].field("model") == "large"


def test_engines_keep_their_gpus_while_the_nodes_with_gpus_are_away() -> None:
    with_gpus = replace(PLAN, gpus=0.5)
    assert ray_fleet.make_plan(asked(), STATE, [with_gpus], {}) == with_gpus
    assert ray_fleet.make_plan(asked(), STATE, [PLAN], {"GPU": 2.0}) == PLAN
    assert ray_fleet.make_plan(asked(engine_gpus=2.0), STATE, [PLAN], {"GPU": 2.0}).gpus == 2.0
    assert ray_fleet.make_plan(asked(), STATE, [], {"GPU": 2.0}).gpus == 1.0


def test_directions_name_the_first_router_that_serves() -> None:
    def say(**addresses: str) -> Status:
        return Status(PLAN, addresses, "", 0.0)

    routers = {"router-0": say(), "router-1": say(router_address="10.0.0.9:1", router_http_address="10.0.0.9:2")}
    lines = list(ray_fleet.directions({"engine-0": say(scheduler_address="10.0.0.9:3"), **routers}))
    assert "  router-1    router 10.0.0.9:1  http 10.0.0.9:2" in lines
    assert lines[-1] == "kvctl finds all of it with KVCTL_ROUTER=10.0.0.9:1"
    # Another command ends the fleet.
    assert list(ray_fleet.directions({"router-0": say()})) == ["  router-0    "]
    assert list(ray_fleet.directions({})) == []


def test_nodes_that_others_reach_need_tls() -> None:
    ray_fleet.check(PLAN, ["127.0.0.1"], 2)
    with pytest.raises(AddressError, match=r"10\.0\.0\.9.*KVKEEP_TLS_CERT_FILE.*KVKEEP_INSECURE"):
        ray_fleet.check(PLAN, ["127.0.0.1", "10.0.0.9"], 2)
    ray_fleet.check(replace(PLAN, settings={"KVKEEP_INSECURE": "1"}), ["10.0.0.9"], 2)


def test_what_members_would_refuse_is_refused_at_once() -> None:
    with pytest.raises(LayoutError, match="2 shards for 1 engines"):
        ray_fleet.check(PLAN, ["127.0.0.1"], 1)
    for name in ("KVKEEP_EXECUTOR_THREADS", "KVKEEP_ROUTER_POLICY", "KVKEEP_CACHEMGR_PIN_BUDGET"):
        with pytest.raises(SettingsError, match=name):
            ray_fleet.check(replace(PLAN, settings={name: "many"}), ["127.0.0.1"], 2)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Ray is not to be started here, and no cluster of this machine is found."""

    def init(*_: object, **__: object) -> None:
        raise ConnectionError("not a cluster")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return monkeypatch


def connect() -> None:
    ray_fleet.connect(Namespace(stop=False, engines=1, shards=1, routers=1, engine_cpus=1.0))


def test_a_named_cluster_that_does_not_listen_is_refused_at_once(named: pytest.MonkeyPatch) -> None:
    address = free_address()
    named.setenv("RAY_ADDRESS", address)
    with pytest.raises(LayoutError, match=rf"^cannot reach the Ray cluster at {address} \(RAY_ADDRESS\): .*refused"):
        connect()


def test_no_other_ray_takes_the_place_of_a_named_cluster(named: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        for address in (f"127.0.0.1:{listener.getsockname()[1]}", "auto"):
            named.setenv("RAY_ADDRESS", address)
            with pytest.raises(LayoutError, match=f"cannot reach the Ray cluster at {address} .*not a cluster"):
                connect()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "head", "head:http", "head:70000"])
def test_an_address_of_another_form_is_refused(address: str, named: pytest.MonkeyPatch) -> None:
    named.setenv("RAY_ADDRESS", address)
    with pytest.raises(LayoutError, match=f"RAY_ADDRESS: {address} must be host:port"):
        connect()


@pytest.mark.parametrize("address", ["", "local"])
def test_a_ray_of_this_program_is_started_where_no_cluster_is_named(address: str, named: pytest.MonkeyPatch) -> None:
    named.setenv("RAY_ADDRESS", address)
    started: list[object] = []

    def init(address: str, **_: object) -> None:
        if address == "auto":
            raise ConnectionError("none runs here")
        started.append(address)

    named.setattr("ray.init", init)
    connect()
    assert started == ["local"]


def test_a_change_of_engines_keeps_the_routers_of_the_running_fleet() -> None:
    assert ray_fleet.num_routers(["cachemgr-0", "engine-0", "router-0", "router-1"]) == 2
    assert ray_fleet.num_routers([]) == 1


@pytest.mark.parametrize(("first_port", "engines", "routers"), [(0, 2, 1), (65_517, 2, 1), (65_500, 2, 4)])
def test_ports_that_no_machine_has_are_refused_with_the_option(first_port: int, engines: int, routers: int) -> None:
    with pytest.raises(LayoutError, match=f"--first-port {first_port}: "):
        ray_fleet.check(replace(PLAN, first_port=first_port), ["127.0.0.1"], engines, routers)


def test_the_last_port_may_be_used() -> None:
    ray_fleet.check(replace(PLAN, first_port=65_516), ["127.0.0.1"], 2)
