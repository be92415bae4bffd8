"""What is wrong with the addresses of a stack is reported with their settings, before anything starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import layout
import pytest
import run_stack

from protos.rpc.addresses import AddressError
from tests.stack import ROOT
from tests.support.patience import patience
from tests.support.ports import free_address

NAMES = (
    "KVKEEP_SCHEDULER_ADDRESS",
    "KVKEEP_SCHEDULER_HTTP_ADDRESS",
    "KVKEEP_SCHEDULER_METRICS_ADDRESS",
    "KVKEEP_CACHEMGR_ADDRESS",
    "KVKEEP_CACHEMGR_ADMIN_ADDRESS",
    "KVKEEP_CACHEMGR_METRICS_ADDRESS",
    "KVKEEP_CONSOLE_ADDRESS",
    "KVKEEP_EXECUTOR_ADDRESS",
    "KVKEEP_EXECUTOR_METRICS_ADDRESS",
)


def environment(**settings: str) -> dict[str, str]:
    """A model that does not exist: a process that gets as far as loading it says so."""
    return {name: free_address() for name in NAMES} | {"KVKEEP_EXECUTOR_MODEL": "/no/model"} | settings


def check_fleet(folder: Path, engines: int, shards: int, **settings: str) -> None:
    """What a fleet does before it starts anything. The ports for metrics are off."""
    off = {name: "" for name in NAMES if name.endswith("METRICS_ADDRESS")}
    environ = environment(KVKEEP_STATE_DIR=str(folder), **off, **settings)
    run_stack.check_addresses(layout.fleet(environ, engines, shards))


def check(**settings: str) -> None:
    """What the stack does before it starts anything."""
    environ = environment(**settings)
    run_stack.check_addresses(layout.single(environ) + layout.console(environ))


def start(*line: str, **settings: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    return subprocess.run(
        [sys.executable, *line],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment(**settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_address_for_other_machines_needs_tls(name: str) -> None:
    with pytest.raises(AddressError, match=rf"0\.0\.0\.0:50999 \(set by {name}\).*KVKEEP_TLS_CERT_FILE"):
        check(**{name: "0.0.0.0:50999"})


def test_a_process_may_be_insecure_alone(tmp_path: Path) -> None:
    check(KVKEEP_EXECUTOR_ADDRESS="0.0.0.0:50999", KVKEEP_EXECUTOR_INSECURE="1")
    with pytest.raises(AddressError, match="KVKEEP_CACHEMGR_ADDRESS"):
        check(KVKEEP_CACHEMGR_ADDRESS="0.0.0.0:50999", KVKEEP_EXECUTOR_INSECURE="1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("127.0.0.1:{port}", "127.0.0.1:{port}"),
        ("127.0.0.1:{port}", "localhost:{port}"),
        ("unix:{folder}/socket", "unix:{folder}/socket"),
        ("0.0.0.0:{port}", "127.0.0.1:{port}"),
        ("[::]:{port}", "127.0.0.1:{port}"),
    ],
)
def test_an_address_given_twice_is_named_with_both_settings(one: str, other: str, tmp_path: Path) -> None:
    port = free_address().rpartition(":")[2]
    given = {
        "KVKEEP_SCHEDULER_ADDRESS": one.format(port=port, folder=tmp_path),
        "KVKEEP_EXECUTOR_ADDRESS": other.format(port=port, folder=tmp_path),
    }
    with pytest.raises(AddressError, match=r"KVKEEP_SCHEDULER_ADDRESS.*KVKEEP_EXECUTOR_ADDRESS.*another port"):
        check(KVKEEP_INSECURE="1", **given)


def test_addresses_that_only_look_alike_are_taken() -> None:
    """Port 0 is any port, and one port of two addresses is two."""
    port = free_address().rpartition(":")[2]
    check(
        KVKEEP_SCHEDULER_ADDRESS=f"127.0.0.1:{port}",
        KVKEEP_EXECUTOR_ADDRESS=f"127.0.0.2:{port}",
        KVKEEP_CACHEMGR_METRICS_ADDRESS="127.0.0.1:0",
        KVKEEP_EXECUTOR_METRICS_ADDRESS="127.0.0.1:0",
    )


def test_shards_share_the_settings_of_their_ports_for_routers_of_others(tmp_path: Path) -> None:
    check_fleet(tmp_path, 2, 2, KVKEEP_CACHEMGR_ZMQ_EVENTS="127.0.0.1:9557")


def test_ports_of_executors_that_would_meet_are_named(tmp_path: Path) -> None:
    given = {"KVKEEP_CACHEMGR_ZMQ_EVENTS": "127.0.0.1:9557", "KVKEEP_CACHEMGR_ZMQ_REPLAYS": "127.0.0.1:9558"}
    check_fleet(tmp_path, 1, 1, **given)
    for shards in (1, 2):
        with pytest.raises(AddressError) as caught:
            check_fleet(tmp_path, 2, shards, **given)
        said = str(caught.value)
        for setting in ("ZMQ_EVENTS for executor-1", "ZMQ_REPLAYS for executor-0"):
            assert f"127.0.0.1:9558 (set by KVKEEP_CACHEMGR_{setting})" in said


def test_a_port_of_an_executor_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            run_stack.StackError, match=f":{port}: Address already in use; KVKEEP_CACHEMGR_ZMQ_EVENTS for executor-1"
        ):
            check_fleet(tmp_path, 2, 2, KVKEEP_CACHEMGR_ZMQ_EVENTS=f"127.0.0.1:{port - 1}")


def test_the_stack_says_so_in_a_line_and_starts_nothing(tmp_path: Path) -> None:
    done = start("ops/run_stack.py", KVKEEP_STATE_DIR=str(tmp_path), KVKEEP_CONSOLE_ADDRESS="0.0.0.0:50999")
    assert (done.returncode, done.stdout) == (1, "")
    [said] = done.stderr.splitlines()
    assert said.startswith("run-stack: 0.0.0.0:50999 (set by KVKEEP_CONSOLE_ADDRESS)")


def test_the_executor_says_so_before_it_loads_the_model() -> None:
    done = start("-m", "executor", KVKEEP_EXECUTOR_METRICS_ADDRESS="0.0.0.0:50999")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("executor: ")
    assert "KVKEEP_EXECUTOR_METRICS_ADDRESS" in said


@pytest.mark.parametrize("process", ["scheduler", "cachemgr", "executor"])
def test_each_process_names_two_settings_with_the_same_address(process: str) -> None:
    names = [f"KVKEEP_{process.upper()}_{kind}" for kind in ("ADDRESS", "METRICS_ADDRESS")]
    done = start("-m", process, **dict.fromkeys(names, free_address()))
    assert (done.returncode, done.stdout) == (1, "")
    [said] = done.stderr.splitlines()
    assert "choose another port" in said
    assert all(name in said for name in names)


@pytest.mark.parametrize(("process", "count"), [("scheduler", 3), ("cachemgr", 5), ("executor", 2), ("console", 1)])
def test_each_process_knows_all_addresses_that_it_listens_on(process: str, count: int) -> None:
    own = layout.process(process, environment()).settings.listening
    assert len(own) == count
    assert all(name.startswith(f"KVKEEP_{process.upper()}_") for name in own)
