"""A member of a fleet on a Ray cluster: a cache manager, an engine or a router with its processes, as a Ray actor."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# Children become other programs at once: gRPC need not prepare itself for a fork. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import layout
import ray
from layout import Process, kind_of
from ray.exceptions import RayError
from run_stack import STOP_MARGIN_SECONDS, TICK_SECONDS, make_service
from sockets import socket_in
from supervisor import Service, ServiceFailedError, Supervisor

from cachemgr.settings import CachemgrSettings
from protos.rpc.files import prepare_folder
from protos.rpc.settings import PREFIX, load

# Ray's namespace of the members' names.
NAMESPACE = "kvkeep"
# The settings with a port, in the order of the ports; members of one number share a range of ports.
PORTS = (
    "router_address",
    "router_http_address",
    "router_metrics_address",
    "cachemgr_address",
    "cachemgr_admin_address",
    "cachemgr_metrics_address",
    "scheduler_address",
    "scheduler_metrics_address",
    "executor_metrics_address",
)
PORTS_OF_A_NUMBER = 10
GIB = 2**30
# Seconds between looks for the addresses of other members, to wait for answers, and to report why the member ends.
LOOK_SECONDS, ANSWER_SECONDS, PAUSE_SECONDS = 1.0, 2.0, 3.0


@dataclass(frozen=True)
class FleetPlan:
    """The settings that all members of a fleet know.

    settings: variables that begin with KVKEEP_. cpus, gpus, memory: of an engine; memory in GiB, 0 for any.
    """

    settings: Mapping[str, str]
    shards: int
    cpus: float
    gpus: float
    first_port: int
    memory: float = 0.0

    def address(self, setting: str, host: str, number: int) -> str:
        """The address on which a member of this number listens."""
        port = self.first_port + number * PORTS_OF_A_NUMBER + PORTS.index(setting)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def differences(self, other: FleetPlan) -> list[str]:
        """Names of settings and options that differ."""
        names = sorted({*self.settings, *other.settings})
        found = [name for name in names if self.settings.get(name) != other.settings.get(name)]
        options = (field.name for field in fields(self) if field.name != "settings")
        return found + [name for name in options if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True)
class Status:
    """A member's report about itself.

    addresses: where its processes listen, by setting; empty until they are started. pending: empty after all
    processes serve, else the next event, for people. stop_seconds: the time that the processes may take to end.
    """

    plan: FleetPlan
    addresses: Mapping[str, str]
    pending: str
    stop_seconds: float


def number_of(name: str) -> int:
    """The number of a member within its kind."""
    return int(name.partition("-")[2])


def make_processes(
    name: str, plan: FleetPlan, host: str, *, share: float = 1.0, shard: Mapping[str, str] | None = None
) -> list[Process]:
    """The processes of a member; each needs only earlier ones.

    host: on which they listen. share: of the node's memory, for an engine. shard: addresses of an engine's cache
    manager by setting. Raises SettingsError, AddressError.
    """
    number = number_of(name)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)} | dict(plan.settings)
    if not plan.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = load(CachemgrSettings, environ).state_dir.expanduser().resolve() / name

    def own(process: str) -> dict[str, object]:
        listening = (setting for setting in PORTS if setting.startswith(process))
        return {"state_dir": folder} | {setting: plan.address(setting, host, number) for setting in listening}

    if kind_of(name) == "cachemgr":
        return [layout.shard(environ, number, own("cachemgr"))]
    if kind_of(name) == "router":
        engines = {"router_engines": f"file://{folder / 'engines'}", "router_router_id": name}
        return [layout.router(name, environ, own("router") | engines)]
    neighbours = {**(shard or {}), "executor_address": f"unix:{socket_in(folder, 'executor')}"}
    threads = max(1, int(plan.cpus))
    return [
        layout.executor(environ, number, own("executor") | neighbours, threads=threads, share=share),
        layout.scheduler(environ, number, own("scheduler") | neighbours),
    ]


def share_of(plan: FleetPlan, resources: Mapping[str, float]) -> float:
    """The share of memory that an engine may take: of its GPU, or else of its node. resources: Ray's, of the node."""
    if plan.gpus:
        share = plan.gpus
    elif plan.memory:
        share = plan.memory * GIB / resources["memory"]
    else:
        share = plan.cpus / max(1.0, resources.get("CPU", 1.0))
    return min(1.0, share)


def members() -> list[str]:
    """Names of all members, including members without a node."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = (actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return sorted(names, key=lambda name: (kind_of(name), number_of(name)))


def find(names: Iterable[str]) -> dict[str, Any]:
    """The actors of the existing members, by name."""
    found = {}
    for name in names:
        # The member does not exist any more.
        with contextlib.suppress(ValueError):
            found[name] = ray.get_actor(name, NAMESPACE)
    return found


def ask(names: Iterable[str], seconds: float | None = None) -> dict[str, Status]:
    """Statuses of members by name; late answers are left out. seconds: the time limit, ANSWER_SECONDS by default."""
    calls: dict[ray.ObjectRef[Status], str] = {actor.status.remote(): name for name, actor in find(names).items()}
    timeout = ANSWER_SECONDS if seconds is None else seconds
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout) if calls else ([], [])
    answers = {}
    for call in done:
        # The member is being started again.
        with contextlib.suppress(RayError):
            answers[calls[call]] = ray.get(call)
    return answers


class Member:
    """Runs the processes of a member, and restarts processes that end.

    If a process ends too often, the actor ends; Ray then starts it again, on a different node if it must.
    """

    def __init__(self, name: str, plan: FleetPlan) -> None:
        self._name = name
        self._plan = plan
        self._addresses: dict[str, str] = {}
        self._pending = "to be started"
        self._stop_seconds = 0.0
        # Addresses of the engines that the router knows, by name.
        self._engines: dict[str, str] = {}
        self._stopping = threading.Event()
        # Ray lowers the priority of its workers, and their children would have the low priority, too.
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except PermissionError:
            print(f"{name}: runs with a low priority: start Ray with RAY_worker_niceness=0", flush=True)
        # Children end with the thread that has started them.
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def status(self) -> Status:
        """Answers at once."""
        return Status(self._plan, self._addresses, self._pending, self._stop_seconds)

    def stop(self) -> None:
        """Ends the processes in order, and the actor for good."""
        self._stopping.set()
        self._thread.join()
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def _live(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run()
        except ServiceFailedError as error:
            self._pending = f"to be restarted: {error}"
            print(f"{self._name}: {error}", *error.service.process.tail(), sep="\n", flush=True)
        except BaseException as error:
            self._pending = f"to be restarted: {error}"
            traceback.print_exc()
        # Otherwise Ray would start the actor again at once, and its last status would be lost.
        if not self._stopping.wait(PAUSE_SECONDS):
            os._exit(1)

    def _run(self) -> None:
        """Runs the processes until the member is stopped, or the shard of an engine is elsewhere."""
        shard = self._find_shard()
        if shard is None:
            self._pending = "to find its cache manager"
            self._stopping.wait(LOOK_SECONDS)
            return
        host, resources = _this_node()
        processes = make_processes(self._name, self._plan, host, share=share_of(self._plan, resources), shard=shard)
        folder = processes[0].settings.state_dir
        prepare_folder(folder, f"{PREFIX}STATE_DIR")
        services = [make_service(process) for process in processes]
        supervisor = Supervisor(services, self._report)
        self._stop_seconds = sum(process.stop_seconds + STOP_MARGIN_SECONDS for process in processes)
        self._addresses = {
            setting: str(process.own[setting])
            for process in processes
            for setting in PORTS
            if setting.startswith(process.kind)
        }
        try:
            for service in services:
                supervisor.start(service)
            look_at = 0.0
            while not self._stopping.wait(TICK_SECONDS):
                supervisor.tick()
                kinds = [kind_of(service.name) for service in services if not service.ready]
                self._pending = f"to be ready: {', '.join(kinds)}" if kinds else ""
                if time.monotonic() < look_at:
                    continue
                look_at = time.monotonic() + LOOK_SECONDS
                if kind_of(self._name) == "router":
                    self._list_engines(folder / "engines")
                elif self._find_shard() not in (None, shard):
                    print(f"{self._name}: its cache manager is elsewhere", flush=True)
                    supervisor.kill()
                    return
        finally:
            # In this order: a member without an address has something pending.
            self._pending, self._addresses = "to be stopped", {}
            supervisor.stop()

    def _find_shard(self) -> dict[str, str] | None:
        """Addresses of an engine's cache manager, None while they are not known; empty for other members."""
        if kind_of(self._name) != "engine":
            return {}
        name = f"cachemgr-{number_of(self._name) % self._plan.shards}"
        try:
            found = ask([name]).get(name)
        except (RayError, ConnectionError):
            return None
        if found is None or not found.addresses:
            return None
        return {setting: found.addresses[setting] for setting in ("cachemgr_address", "cachemgr_admin_address")}

    def _list_engines(self, path: Path) -> None:
        """Writes the file that the router polls. An engine that does not answer keeps its last address."""
        try:
            names = [name for name in members() if kind_of(name) == "engine"]
            found = {name: said.addresses.get("scheduler_address") for name, said in ask(names).items()}
        except (RayError, ConnectionError):
            return
        engines = {name: address for name in names if (address := found.get(name) or self._engines.get(name))}
        if engines != self._engines or not path.exists():
            self._engines = engines
            written = path.with_suffix(".new")
            written.write_text("".join(f"{address}\n" for address in engines.values()))
            written.replace(path)

    def _report(self, service: Service, state: str) -> None:
        print(f"{service.name}: {state}", flush=True)


def _this_node() -> tuple[str, dict[str, float]]:
    """The address of the node that this actor runs on, and its resources by Ray's names."""
    node_id = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == node_id]  # type: ignore[no-untyped-call]
    return node["NodeManagerAddress"], node["Resources"]
