"""A fleet on one machine: processes share nothing by mistake, and callers find it where one engine was."""

import re
import subprocess
from pathlib import Path

import layout
import pytest
import run_stack
from hypothesis import given
from hypothesis import strategies as st
from layout import LayoutError, Process

from protos.rpc.addresses import check_distinct
from tests.stack import ROOT

CORES = set(range(8))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: CORES)


def environ(**settings: str) -> dict[str, str]:
    return {"KVKEEP_STATE_DIR": "/state", "CUDA_VISIBLE_DEVICES": ""} | settings


def by_name(processes: list[Process]) -> dict[str, Process]:
    return {process.name: process for process in processes}


@given(engines=st.integers(1, 20), data=st.data())
def test_no_two_processes_have_an_address_a_name_or_a_redis_of_their_own_twice(
    engines: int, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, engines))
    processes = layout.fleet(run_stack.DEFAULTS | environ(), engines, shards)
    check_distinct({setting: address for _, setting, address in layout.listening(processes)})
    assert len({one.name for one in processes}) == len(processes)
    for kind, field, count in (
        ("cachemgr", "shard", shards),
        ("executor", "executor_id", engines),
        ("scheduler", "scheduler_id", engines),
    ):
        assert len({one.field(field) for one in processes if one.kind == kind}) == count


def test_an_engine_knows_its_own_executor_and_its_own_shard() -> None:
    found = by_name(layout.fleet(environ(), engines=5, shards=2))
    for number in range(5):
        shard, executor = found[f"cachemgr-{number % 2}"].settings, found[f"executor-{number}"].settings
        scheduler = found[f"scheduler-{number}"].settings
        assert scheduler.executor_address == executor.executor_address
        for one in (executor, scheduler):
            assert one.cachemgr_address == shard.cachemgr_address
        # The router follows the events of the shard that a scheduler names.
        assert scheduler.cachemgr_admin_address == shard.cachemgr_admin_address
    engines = [found[f"scheduler-{number}"].settings.scheduler_address for number in range(5)]
    assert found["router"].field("engines") == str(tuple(engines))


def test_the_router_and_the_first_shard_are_where_callers_know_a_stack() -> None:
    given = environ(
        KVKEEP_SCHEDULER_ADDRESS="127.0.0.1:7001",
        KVKEEP_SCHEDULER_HTTP_ADDRESS="127.0.0.1:7002",
        KVKEEP_SCHEDULER_SERVED_MODEL_NAMES="a,b",
        KVKEEP_SCHEDULER_HTTP_ALLOWED_ORIGINS="https://chat.example.com",
    )
    found, single = by_name(layout.fleet(given, 2, 2)), by_name(layout.single(given))
    router, shard = found["router"], found["cachemgr-0"]
    assert router.field("address") == "127.0.0.1:7001"
    assert router.field("http_address") == "127.0.0.1:7002"
    assert router.field("served_model_names") == str(("a", "b"))
    assert router.field("http_allowed_origins") == str(("https://chat.example.com",))
    assert shard.addresses == single["cachemgr"].addresses
    # Its keys in Redis are those of a cache manager alone.
    assert shard.field("shard") == ""
    assert {found[f"scheduler-{number}"].field("http_address") for number in range(2)} == {""}
    moved = by_name(layout.fleet(given | {"KVKEEP_ROUTER_ADDRESS": "127.0.0.1:7003"}, 2))
    assert moved["router"].field("address") == "127.0.0.1:7003"


def test_one_engine_has_the_settings_that_were_given_and_no_others() -> None:
    given = environ(KVKEEP_EXECUTOR_THREADS="3")
    assert {tuple(one.own) for one in layout.single(given)} == {()}
    assert all(one.environ == given for one in layout.single(given))


def test_executors_share_cores_and_memory_evenly() -> None:
    executors = [one for one in layout.fleet(environ(), 3) if one.kind == "executor"]
    assert [one.field("threads") for one in executors] == ["2"] * 3
    assert [float(one.field("free_memory_fraction")) for one in executors] == pytest.approx([0.3] * 3)
    many = [one for one in layout.fleet(environ(), 20) if one.kind == "executor"]
    assert {one.field("threads") for one in many} == {"1"}
    chosen = [one for one in layout.fleet(environ(KVKEEP_EXECUTOR_THREADS="5"), 3) if one.kind == "executor"]
    assert {one.field("threads") for one in chosen} == {"5"}


def test_executors_share_gpus_evenly() -> None:
    def executors(**settings: str) -> list[Process]:
        made = layout.fleet(environ(CUDA_VISIBLE_DEVICES="2,GPU-5", **settings), 3)
        return [one for one in made if one.kind == "executor"]

    assert [one.environ["CUDA_VISIBLE_DEVICES"] for one in executors()] == ["2", "GPU-5", "2"]
    assert float(executors()[0].field("free_memory_fraction")) == pytest.approx(0.45)
    # A device that was chosen is everybody's.
    chosen = executors(KVKEEP_EXECUTOR_DEVICE="cuda:1")
    assert [one.environ["CUDA_VISIBLE_DEVICES"] for one in chosen] == ["2,GPU-5"] * 3
    assert float(chosen[0].field("free_memory_fraction")) == pytest.approx(0.3)


def test_given_names_begin_the_names_of_all() -> None:
    found = by_name(layout.fleet(environ(KVKEEP_EXECUTOR_EXECUTOR_ID="a", KVKEEP_SCHEDULER_SCHEDULER_ID="b"), 2))
    assert [found[f"executor-{number}"].field("executor_id") for number in range(2)] == ["a-0", "a-1"]
    assert [found[f"scheduler-{number}"].field("scheduler_id") for number in range(2)] == ["b-0", "b-1"]


def test_metrics_of_a_kind_are_a_hundred_ports_apart_and_off_where_they_are_off() -> None:
    found = by_name(layout.fleet(environ(KVKEEP_EXECUTOR_METRICS_ADDRESS="127.0.0.1:9103"), 3))
    assert [found[f"executor-{number}"].field("metrics_address") for number in range(3)] == [
        "127.0.0.1:9103",
        "127.0.0.1:9203",
        "127.0.0.1:9303",
    ]
    assert {found[f"scheduler-{number}"].field("metrics_address") for number in range(3)} == {""}


@pytest.mark.parametrize("given", ["1", "a", "2-1"])
def test_a_given_name_of_a_shard_begins_the_names_of_all(given: str) -> None:
    found = by_name(layout.fleet(environ(KVKEEP_CACHEMGR_SHARD=given), 3, 3))
    names = [found[f"cachemgr-{number}"].field("shard") for number in range(3)]
    assert names == [given, f"{given}-1", f"{given}-2"]


def test_each_executor_has_ports_of_its_own_for_routers_of_others() -> None:
    given = environ(
        KVKEEP_CACHEMGR_ZMQ_EVENTS="127.0.0.1:5557",
        KVKEEP_CACHEMGR_ZMQ_REPLAYS="127.0.0.1:6557",
        KVKEEP_EXECUTOR_EXECUTOR_ID="a",
    )
    found = {
        setting: (one.name, address)
        for one, setting, address in layout.listening(layout.fleet(given, 3, 2))
        if "ZMQ" in setting
    }
    assert found == {
        "KVKEEP_CACHEMGR_ZMQ_EVENTS for a-0": ("cachemgr-0", "127.0.0.1:5557"),
        "KVKEEP_CACHEMGR_ZMQ_EVENTS for a-1": ("cachemgr-1", "127.0.0.1:5558"),
        "KVKEEP_CACHEMGR_ZMQ_EVENTS for a-2": ("cachemgr-0", "127.0.0.1:5559"),
        "KVKEEP_CACHEMGR_ZMQ_REPLAYS for a-0": ("cachemgr-0", "127.0.0.1:6557"),
        "KVKEEP_CACHEMGR_ZMQ_REPLAYS for a-1": ("cachemgr-1", "127.0.0.1:6558"),
        "KVKEEP_CACHEMGR_ZMQ_REPLAYS for a-2": ("cachemgr-0", "127.0.0.1:6559"),
    }
    last = layout.fleet(given | {"KVKEEP_CACHEMGR_ZMQ_EVENTS": "127.0.0.1:65534"}, 3, 2)
    with pytest.raises(LayoutError, match="KVKEEP_CACHEMGR_ZMQ_EVENTS: 65534 and 2 are more than 65535"):
        list(layout.listening(last))


def test_each_shard_has_an_operation_log() -> None:
    found = by_name(layout.fleet(environ(KVKEEP_CACHEMGR_OPERATION_LOG="/logs/operations"), 2, 2))
    assert [found[f"cachemgr-{number}"].field("operation_log") for number in range(2)] == [
        "/logs/operations",
        "/logs/operations-1",
    ]


def test_sockets_fit_in_a_folder_with_a_long_name() -> None:
    long = environ(KVKEEP_STATE_DIR="/" + "x" * 120)
    sockets = [address for one in layout.fleet(long, 2) for address in one.addresses if address.startswith("unix:")]
    assert len(sockets) == len(set(sockets)) == 4
    assert all(len(bytes(Path(address.removeprefix("unix:")))) <= 100 for address in sockets)


def test_two_stacks_with_the_variables_of_the_page_do_not_meet() -> None:
    page = (ROOT / "docs/routers.md").read_text().partition("## Two engines to try it with")[2].partition("\n## ")[0]
    blocks = [block for block in re.findall(r"^(?: {4}.*\n)+", page, re.MULTILINE) if "make run-stack" in block]
    stacks = []
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euc", "make() { env --null; }\n" + block], env={}, capture_output=True, text=True, check=True
        )
        told = dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair.startswith("KVKEEP_"))
        given = run_stack.DEFAULTS | {"KVKEEP_STATE_DIR": "/state"} | told
        stacks.append(layout.single(given) + layout.console(given))
    assert len(stacks) == 2
    check_distinct(
        {f"{number} {name}": address for number, stack in enumerate(stacks)
         for _, name, address in layout.listening(stack)}
    )  # fmt: skip
    assert len({one.settings.state_dir for stack in stacks for one in stack}) == 2
    for stack in stacks:
        found = by_name(stack)
        assert found["cachemgr"].field("zmq_token_ids") == "True"
        assert f"http://{found['scheduler'].field('http_address')}" in page


@pytest.mark.parametrize(
    ("engines", "shards", "settings", "said"),
    [
        (0, 1, {}, "--engines must be above zero, not 0"),
        (2, 3, {}, "3 shards for 2 engines"),
        (2, 0, {}, "0 shards for 2 engines"),
        (2, 1, {"KVKEEP_ROUTER_ENGINES": "a:1"}, "KVKEEP_ROUTER_ENGINES"),
        (7, 1, {"KVKEEP_EXECUTOR_METRICS_ADDRESS": "127.0.0.1:65000"}, "KVKEEP_EXECUTOR_METRICS_ADDRESS"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(engines: int, shards: int, settings: dict[str, str], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        layout.fleet(environ(**settings), engines, shards)
