"""Brings the fleet of a Ray cluster to a size, or ends it: `python -m ops.ray_fleet --engines 4`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The scripts in this folder are no package, and import each other by their names.
sys.path.append(str(Path(__file__).resolve().parent))

if find_spec("ray") is None:
    sys.exit(
        "ray-fleet: ray is not installed for this Python. In the checkout, run:\n"
        "  .venv/bin/python -m pip install --constraint ops/constraints.txt --editable '.[ray]'"
    )

import ray
from layout import LayoutError, check_counts, kind_of
from ray.exceptions import ActorAlreadyExistsError, RayError
from ray_member import GIB, NAMESPACE, PORTS_OF_A_NUMBER, FleetPlan, Member, Status, ask, find, make_processes, members
from run_stack import ROOT, STOP_MARGIN_SECONDS

from protos.rpc import addresses
from protos.rpc.addresses import AddressError
from protos.rpc.settings import PREFIX
from protos.rpc.startup import process_parser

# The kinds of members, in the order in which they are ended.
KINDS = ("router", "engine", "cachemgr")
FIRST_PORT, MAX_PORT = 20_000, 65_535
# Ray's CPUs for a cache manager or a router.
CPUS = 1.0
LOOK_SECONDS, PROBE_SECONDS = 1.0, 5.0
# Members of a busy node answer late. A member that is killed does not drain.
STOP_ANSWER_SECONDS = 10.0
# The address of Ray and all members if Ray runs only on this machine. Ray would replace 127.0.0.1 by an
# address that other machines can reach.
LOCAL_HOST = "127.0.0.2"


def check(plan: FleetPlan, hosts: Iterable[str], engines: int, routers: int = 1) -> None:
    """Finds errors that members would find on their nodes. Raises LayoutError, SettingsError, AddressError."""
    check_counts(plan.settings, engines, plan.shards)
    last = plan.first_port + max(engines, routers) * PORTS_OF_A_NUMBER - 1
    if plan.first_port < 1 or last > MAX_PORT:
        raise LayoutError(
            f"--first-port {plan.first_port}: the members' ports would end at {last}, and must be from 1 to {MAX_PORT}"
        )
    for host in hosts:
        for kind in KINDS:
            for process in make_processes(f"{kind}-0", plan, host):
                insecure = process.settings.security.may_be_reached
                for address in process.settings.listening.values():
                    # A socket belongs to a node.
                    if address and addresses.socket_path(address) is None:
                        addresses.prepare(address, insecure=insecure)


def scale(plan: FleetPlan, engines: int, routers: int) -> None:
    """Starts missing members, and ends surplus members, whose requests go on elsewhere.

    Raises LayoutError if the running fleet has a different plan, or if another command changes the fleet.
    """
    there = members()
    said = ask(there)
    for name, status in said.items():
        if differences := plan.differences(status.plan):
            raise LayoutError(
                f"{name} of the fleet that runs has other settings ({', '.join(differences)}): "
                "give the same settings, or end that fleet with --stop"
            )
    if there and not said:
        raise LayoutError("no member of the fleet that runs answers: try it again, or end that fleet with --stop")
    counts = {"cachemgr": plan.shards, "engine": engines, "router": routers}
    wanted = [f"{kind}-{number}" for kind, count in counts.items() for number in range(count)]
    for name in wanted:
        if name not in there:
            start(name, plan)
    stop(name for name in there if name not in wanted)


def start(name: str, plan: FleetPlan) -> None:
    """Has Ray start a member, as soon as a node has room for it. Raises LayoutError if the member exists already."""
    is_engine = kind_of(name) == "engine"
    actor = ray.remote(Member).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        # Several calls at once: the member reports its status while it stops.
        max_concurrency=8,
        num_cpus=plan.cpus if is_engine else CPUS,
        num_gpus=plan.gpus if is_engine else 0,
        memory=plan.memory * GIB if is_engine and plan.memory else None,
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'ops'}"}},
    )
    try:
        actor.remote(name, plan)
    except ActorAlreadyExistsError:
        raise LayoutError(f"another command starts {name}: try it again when that command has ended") from None


def wait_until_ready() -> dict[str, Status]:
    """Waits without a limit until all members serve, and prints which are missing. Returns their statuses by name.

    Raises LayoutError if no member is left.
    """
    shown: dict[str, list[str]] = {}
    while True:
        there = members()
        if not there:
            raise LayoutError("another command has ended the fleet")
        said = ask(there)
        pending = defaultdict(list)
        for name in there:
            # The node of a member that does not answer is not known; often the member has no node.
            if what := said[name].pending if name in said else "to find a node with room, or to answer":
                pending[what].append(name)
        if not pending:
            return said
        for what, names in pending.items():
            if shown.get(what) != names:
                print(f"waiting for {', '.join(names)} {what}", flush=True)
        shown = pending
        time.sleep(LOOK_SECONDS)


def stop(names: Iterable[str]) -> None:
    """Ends members kind after kind. Members that answer end in order, within the limits of their processes."""
    chosen = list(names)
    for kind in KINDS:
        handles = find(name for name in chosen if kind_of(name) == kind)
        if not handles:
            continue
        print(f"stopping {', '.join(handles)}", flush=True)
        said = ask(handles, STOP_ANSWER_SECONDS)
        calls: list[Any] = [handles[name].stop.remote() for name in said]
        if calls:
            # The answer of an actor that ends may be lost.
            seconds = max(status.stop_seconds for status in said.values()) + STOP_MARGIN_SECONDS
            ray.wait(calls, num_returns=len(calls), timeout=seconds)
        for name in set(handles).intersection(members()):
            ray.kill(handles[name], no_restart=True)


def directions(said: dict[str, Status]) -> Iterator[str]:
    """Yields the address of each member, line by line."""
    routers = []
    for name, status in said.items():
        shown = []
        for setting, address in status.addresses.items():
            process, _, what = setting.removesuffix("_address").partition("_")
            shown.append(f"{what or process} {address}")
            if setting == "router_address":
                routers.append(address)
        yield f"  {name:<11} {'  '.join(shown)}"
    # Another command may have ended the routers.
    if routers:
        yield ""
        yield f"kvctl finds all of it with KVCTL_ROUTER={routers[0]}"


def parse() -> argparse.Namespace:
    parser = process_parser(
        "python -m ops.ray_fleet",
        "Brings the fleet of a Ray cluster to N engines, cache managers and routers. Ray places them on nodes and\n"
        "restarts them; they stay after this program has ended. RAY_ADDRESS names the cluster, by default the cluster\n"
        "on this machine. Without a cluster, this program starts Ray here, and Ctrl-C ends everything.",
    )
    parser.add_argument("--model", metavar="MODEL", help="a folder, a GGUF file or a hub id, as KVKEEP_EXECUTOR_MODEL")
    parser.add_argument("--engines", type=int, metavar="N", help="schedulers, each with an executor")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="cache managers that divide the engines")
    parser.add_argument(
        "--routers",
        type=int,
        metavar="N",
        help="routers in front of all engines; by default as in the running fleet, else 1",
    )
    parser.add_argument("--engine-cpus", type=float, default=1.0, metavar="N", help="CPUs of an engine, its threads")
    parser.add_argument(
        "--engine-gpus",
        type=float,
        metavar="N",
        help="GPUs of an engine; by default as in the running fleet, else 1 if the cluster has any",
    )
    parser.add_argument(
        "--engine-memory", type=float, default=0.0, metavar="GIB", help="memory that a node must have for an engine"
    )
    parser.add_argument("--first-port", type=int, default=FIRST_PORT, metavar="N", help=f"by default {FIRST_PORT}")
    parser.add_argument("--stop", action="store_true", help="end the fleet")
    given = parser.parse_args()
    if given.stop == (given.engines is not None):
        parser.error("give --engines or --stop")
    if (given.routers is not None and given.routers < 1) or not 0 < given.engine_cpus < math.inf:
        parser.error("--routers and --engine-cpus must be above zero")
    for option in ("engine_gpus", "engine_memory"):
        if not 0 <= (getattr(given, option) or 0.0) < math.inf:
            parser.error(f"--{option.replace('_', '-')} must be zero or above")
    return given


def find_cluster() -> bool:
    """Connects to the cluster of RAY_ADDRESS or of this machine; returns whether there is one. Raises LayoutError."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "local":
        return False
    if address not in ("", "auto"):
        probe(address)
        # Ray tries for minutes if another program listens there.
        print(f"connecting to the Ray cluster at {address} (RAY_ADDRESS)", flush=True)
    try:
        ray.init(address="auto", namespace=NAMESPACE)
    except (ConnectionError, RuntimeError) as error:
        if address:
            raise unreachable(address, error) from None
        if not isinstance(error, ConnectionError):
            raise
        return False
    return True


def probe(address: str) -> None:
    """Raises LayoutError unless something listens at the address of a cluster."""
    try:
        # Addresses with ray:// are of Ray's proxy for clients, and fail here, too.
        host, port = addresses.split_host_port(address)
    except ValueError:
        raise LayoutError(f"RAY_ADDRESS: {address} must be host:port, where the head listens") from None
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except OSError as error:
        raise unreachable(address, error) from None


def unreachable(address: str, error: Exception) -> LayoutError:
    """The error for a cluster that RAY_ADDRESS names."""
    return LayoutError(f"cannot reach the Ray cluster at {address} (RAY_ADDRESS): {error}")


def connect(given: argparse.Namespace) -> bool:
    """Connects to Ray; returns whether Ray runs only for this program. Raises LayoutError."""
    if find_cluster():
        return False
    if given.stop:
        raise LayoutError("no Ray cluster runs on this machine: RAY_ADDRESS can name a cluster elsewhere")
    if "RAY_AUTH_MODE" not in os.environ:
        # Without a token, Ray runs any code for everybody who reaches its ports. Ray reads this variable at its import.
        own = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
        os.execve(sys.executable, sys.orig_argv, own | os.environ)  # noqa: S606
    cpus = math.ceil(given.engines * given.engine_cpus + (given.shards + (given.routers or 1)) * CPUS)
    ray.init("local", num_cpus=cpus, include_dashboard=False, namespace=NAMESPACE, _node_ip_address=LOCAL_HOST)
    return True


def make_plan(
    given: argparse.Namespace, environ: Mapping[str, str], running: Iterable[FleetPlan], resources: Mapping[str, float]
) -> FleetPlan:
    """The requested plan. running: plans of running members. resources: of the cluster, by Ray's names."""
    settings = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    if given.model is not None:
        settings[f"{PREFIX}EXECUTOR_MODEL"] = given.model
    gpus = given.engine_gpus
    if gpus is None:
        # The nodes with GPUs may be away.
        gpus = next((plan.gpus for plan in running), 1.0 if resources.get("GPU") else 0.0)
    return FleetPlan(settings, given.shards, given.engine_cpus, gpus, given.first_port, given.engine_memory)


def num_routers(there: Iterable[str]) -> int:
    """The number of routers without --routers. there: names of the members of the running fleet."""
    return max(1, sum(kind_of(name) == "router" for name in there))


def run(given: argparse.Namespace) -> None:
    """Brings the fleet to the requested size. Raises LayoutError, SettingsError, AddressError."""
    there = members()
    running = [status.plan for status in ask(there).values()]
    plan = make_plan(given, os.environ, running, ray.cluster_resources())  # type: ignore[no-untyped-call]
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    routers = given.routers or num_routers(there)
    check(plan, {node["NodeManagerAddress"] for node in nodes if node["Alive"]}, given.engines, routers)
    scale(plan, given.engines, routers)
    print("the fleet is ready", "", *directions(wait_until_ready()), "", sep="\n", flush=True)


def main() -> int:
    """Returns the exit status."""
    given, is_local = parse(), False
    try:
        is_local = connect(given)
        # Ray has its own handler.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if given.stop:
            stop(members())
            return 0
        run(given)
        if is_local:
            print("Ctrl-C stops it.", flush=True)
            while True:
                # With a time limit: a signal that another thread gets does not wake this thread.
                time.sleep(LOOK_SECONDS)
    except (LayoutError, AddressError, RayError) as error:
        print(f"ray-fleet: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if is_local else 130
    finally:
        if is_local:
            # A second Ctrl-C ends everything at once.
            with contextlib.suppress(KeyboardInterrupt):
                stop(members())
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
