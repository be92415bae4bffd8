"""The processes of a stack, and the settings in which processes of one kind differ."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sockets import socket_in

from cachemgr.settings import CachemgrSettings
from executor.settings import ExecutorSettings, settings_from
from kvctl.console.settings import ConsoleSettings
from protos.rpc import addresses
from protos.rpc.settings import PREFIX, ProcessSettings, load
from scheduler.router.settings import RouterSettings
from scheduler.settings import SchedulerSettings

# Distance between the ports of metrics of two processes of one kind.
METRICS_STEP = 100
EXECUTOR_STOP_SECONDS = 15.0
CONSOLE_STOP_SECONDS = 5.0
ENGINES = f"{PREFIX}ROUTER_ENGINES"
# Addresses of a cache manager. Each executor adds the number at the end of its name to the port.
_EACH_EXECUTOR = (f"{PREFIX}CACHEMGR_ZMQ_EVENTS", f"{PREFIX}CACHEMGR_ZMQ_REPLAYS")


class LayoutError(Exception):
    """There is no such stack; the message is for people."""


class _Kind(NamedTuple):
    """A kind of process. serves: fields with the addresses of its gRPC servers, which report its health."""

    module: str
    load: Callable[[Mapping[str, str]], ProcessSettings]
    serves: tuple[str, ...]
    stop_seconds: float = 0.0


_KINDS = {
    "cachemgr": _Kind("cachemgr", partial(load, CachemgrSettings), ("cachemgr_address", "cachemgr_admin_address")),
    "executor": _Kind("executor", settings_from, ("executor_address",), EXECUTOR_STOP_SECONDS),
    "scheduler": _Kind("scheduler", partial(load, SchedulerSettings), ("scheduler_address",)),
    "router": _Kind("scheduler.router", partial(load, RouterSettings), ("address",)),
    "console": _Kind("kvctl.console", partial(load, ConsoleSettings), (), CONSOLE_STOP_SECONDS),
}


def kind_of(name: str) -> str:
    """The part of a name before the number, for a process or a member of a fleet."""
    return name.partition("-")[0]


@dataclass(frozen=True)
class Process:
    """A process of a stack. Processes of one kind differ by a number after a hyphen: executor-0, executor-1.

    own: settings that only this process has, named like the variables but without KVKEEP_ and in lower case. environ:
    its whole environment. settings: the settings that it reads from the environment.
    """

    name: str
    own: Mapping[str, object]
    environ: Mapping[str, str]
    settings: ProcessSettings

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def module(self) -> str:
        """The module that `python -m` runs."""
        return _KINDS[self.kind].module

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which the process serves gRPC; none for a process without a health service."""
        return tuple(getattr(self.settings, field) for field in _KINDS[self.kind].serves)

    def field(self, name: str) -> str:
        """A setting as text; empty if the process has no setting of this name."""
        return str(getattr(self.settings, name, ""))

    @property
    def drain_seconds(self) -> float:
        """How long running calls may go on after the process is asked to end."""
        return float(getattr(self.settings, "drain_seconds", 0.0))

    @property
    def stop_seconds(self) -> float:
        """How long the process may take to end."""
        return self.drain_seconds + _KINDS[self.kind].stop_seconds

    def listening(self, executors: Iterable["Process"]) -> dict[str, str]:
        """Every address that the process listens on, by variable and, for a process with a number, by name.

        executors: of the stack; a cache manager has ports for each of its own executors. Raises LayoutError.
        """
        of = f" of {self.name}" if self.name != self.kind else ""
        found = {}
        for variable, address in self.settings.listening.items():
            if not address or variable not in _EACH_EXECUTOR:
                found[f"{variable}{of}"] = address
                continue
            for one in executors:
                if one.field("cachemgr_address") == self.field("cachemgr_address"):
                    number = addresses.number_of(one.field("executor_id"))
                    found[f"{variable} for {one.field('executor_id')}"] = moved(address, number, variable)
        return found


def moved(address: str, by: int, variable: str) -> str:
    """An address with a port that is larger by `by`. variable: chooses the address. Raises LayoutError."""
    try:
        return addresses.moved(address, by)
    except ValueError as error:
        raise LayoutError(f"{variable}: {error}: choose a smaller port") from None


def listening(processes: Iterable[Process]) -> Iterator[tuple[Process, str, str]]:
    """Each address of a stack, with its process and the setting that chooses the address. Raises LayoutError."""
    everyone = list(processes)
    executors = [one for one in everyone if one.kind == "executor"]
    for one in everyone:
        for setting, address in one.listening(executors).items():
            yield one, setting, address


def process(name: str, environ: Mapping[str, str], own: Mapping[str, object] | None = None, gpu: str = "") -> Process:
    """A process with the settings of an environment and its own. gpu: the only GPU that it sees; empty for all.

    Raises SettingsError.
    """
    own = own or {}
    whole = dict(environ) | {f"{PREFIX}{setting.upper()}": str(value) for setting, value in own.items()}
    if gpu:
        whole["CUDA_VISIBLE_DEVICES"] = gpu
    return Process(name, own, whole, _KINDS[kind_of(name)].load(whole))


def single(environ: Mapping[str, str]) -> list[Process]:
    """The processes of one engine; each needs only earlier ones. Raises SettingsError."""
    return [process(name, environ) for name in ("cachemgr", "executor", "scheduler")]


def console(environ: Mapping[str, str], engines: Iterable[Process] = ()) -> list[Process]:
    """The console of these processes, unless it is off. Raises SettingsError."""
    made = process("console", {**environ, **_for_operators(list(engines))})
    return [made] if made.field("address") else []


def shard(environ: Mapping[str, str], number: int, own: Mapping[str, object]) -> Process:
    """A cache manager among several. own: its addresses. Raises SettingsError."""
    apart: dict[str, object] = {}
    # The first cache manager has the same names in Redis and in the state folder as a single cache manager.
    if number:
        base = load(CachemgrSettings, environ)
        apart["cachemgr_shard"] = f"{base.shard}-{number}" if base.shard else number
        if log := base.operation_log:
            apart["cachemgr_operation_log"] = log.with_name(f"{log.name}-{number}")
    return process(f"cachemgr-{number}", environ, {**apart, **own})


def executor(
    environ: Mapping[str, str], number: int, own: Mapping[str, object], *, threads: int, share: float, gpu: str = ""
) -> Process:
    """An executor among several. own: addresses, its cache manager's too. Raises SettingsError.

    threads: if none are given. share: of a single executor's memory for pools. gpu: as in `process`.
    """
    base = settings_from(environ)
    apart: dict[str, object] = {
        "executor_executor_id": _named(environ, "executor", number),
        "executor_threads": base.threads or threads,
        "executor_free_memory_fraction": base.free_memory_fraction * share,
    }
    return process(f"executor-{number}", environ, {**apart, **own}, gpu)


def scheduler(environ: Mapping[str, str], number: int, own: Mapping[str, object]) -> Process:
    """A scheduler behind a router. own: addresses, including its neighbours' addresses. Raises SettingsError."""
    apart: dict[str, object] = {
        "scheduler_scheduler_id": _named(environ, "scheduler", number),
        "scheduler_http_address": "",
    }
    return process(f"scheduler-{number}", environ, {**apart, **own})


def router(name: str, environ: Mapping[str, str], own: Mapping[str, object]) -> Process:
    """A router in the place of a scheduler: settings that the router lacks come from the scheduler.

    own: addresses and the list of engines. Raises SettingsError.
    """
    base = load(SchedulerSettings, environ)
    shared = {
        "router_http_allowed_origins": ",".join(base.http_allowed_origins),
        "router_served_model_names": ",".join(base.served_model_names),
    }
    return process(name, environ, {**_unless_given(shared, environ), **own})


def manager_of(shard: Process) -> dict[str, object]:
    """The cache manager's settings that the processes of an engine must know."""
    return {field: shard.field(field) for field in ("cachemgr_address", "cachemgr_admin_address")}


def _for_operators(processes: Sequence[Process]) -> dict[str, str]:
    """The settings with which kvctl finds the shards and the router of a fleet; none for a single engine."""
    fields = {"cachemgr": "cachemgr_admin_address", "router": "address"}
    found = {kind: [one.field(field) for one in processes if one.kind == kind] for kind, field in fields.items()}
    if not found["router"]:
        return {}
    return {"KVCTL_SERVER": ",".join(found["cachemgr"]), "KVCTL_ROUTER": found["router"][0]}


def fleet(environ: Mapping[str, str], engines: int, shards: int = 1) -> list[Process]:
    """Several engines on this machine behind a router; each process needs only earlier ones.

    Engine n belongs to shard n modulo `shards`. The router has the addresses of a single engine's scheduler, and the
    first shard those of a single cache manager. All others have sockets in the state folder. Engines share cores, GPUs
    and memory evenly. Raises LayoutError, SettingsError, AddressError.
    """
    check_counts(environ, engines, shards)
    folder = load(SchedulerSettings, environ).state_dir.expanduser().resolve() / "sockets"
    managers = [_shard(environ, number, folder) for number in range(shards)]
    executors = _executors(environ, [managers[number % shards] for number in range(engines)], folder)
    schedulers = [
        scheduler(
            environ,
            number,
            manager_of(one)
            | {
                "executor_address": one.field("executor_address"),
                "scheduler_address": _socket(folder, f"scheduler-{number}"),
                "scheduler_metrics_address": _moved(load(SchedulerSettings, environ), number),
            },
        )
        for number, one in enumerate(executors)
    ]
    return [*managers, *executors, *schedulers, _router(environ, schedulers)]


def check_counts(environ: Mapping[str, str], engines: int, shards: int) -> None:
    """Raises LayoutError if no such fleet is possible."""
    if engines < 1:
        raise LayoutError(f"--engines must be above zero, not {engines}")
    if not 1 <= shards <= engines:
        raise LayoutError(f"{shards} shards for {engines} engines: each shard needs an engine, each engine a shard")
    if environ.get(ENGINES):
        raise LayoutError(f"{ENGINES} names engines that are not started here: leave it empty")


def _shard(environ: Mapping[str, str], number: int, folder: Path) -> Process:
    own: dict[str, object] = {"cachemgr_metrics_address": _moved(load(CachemgrSettings, environ), number)}
    if number:
        own["cachemgr_address"] = _socket(folder, f"cachemgr-{number}")
        own["cachemgr_admin_address"] = _socket(folder, f"admin-{number}")
    return shard(environ, number, own)


def _executors(environ: Mapping[str, str], managers: Sequence[Process], folder: Path) -> list[Process]:
    """One executor for each of these cache managers."""
    base, count = settings_from(environ), len(managers)
    gpus = _gpus(environ) if base.device in ("auto", "cuda") else []
    # The largest number of executors that share a GPU, or the memory of the host.
    sharing = -(-count // len(gpus)) if gpus else count
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    executors = []
    for number, manager in enumerate(managers):
        own = manager_of(manager) | {
            "executor_address": _socket(folder, f"executor-{number}"),
            "executor_metrics_address": _moved(base, number),
        }
        gpu = gpus[number % len(gpus)] if gpus else ""
        executors.append(executor(environ, number, own, threads=threads, share=1 / sharing, gpu=gpu))
    return executors


def _router(environ: Mapping[str, str], schedulers: Iterable[Process]) -> Process:
    """A router that callers reach where a scheduler would be, unless the environment has other settings for it."""
    base = load(SchedulerSettings, environ)
    own = {"router_address": base.scheduler_address, "router_http_address": base.http_address}
    engines = ",".join(one.field("scheduler_address") for one in schedulers)
    return router("router", environ, _unless_given(own, environ) | {"router_engines": engines})


def _unless_given(own: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that an environment does not have."""
    return {setting: value for setting, value in own.items() if f"{PREFIX}{setting.upper()}" not in environ}


def _named(environ: Mapping[str, str], kind: str, number: int) -> str:
    """The id of an executor or scheduler."""
    return f"{environ.get(f'{PREFIX}{kind.upper()}_{kind.upper()}_ID') or kind}-{number}"


def _socket(folder: Path, name: str) -> str:
    return f"unix:{socket_in(folder, name)}"


def _moved(base: "CachemgrSettings | ExecutorSettings | SchedulerSettings", number: int) -> str:
    """The address of metrics of the process with this number."""
    if not base.metrics_address or not number:
        return base.metrics_address
    return moved(base.metrics_address, number * METRICS_STEP, f"{PREFIX}{base.process.upper()}_METRICS_ADDRESS")


def _gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that processes may use, by CUDA's names."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu.strip() not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
