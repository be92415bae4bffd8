"""Which processes a stack has, and the settings that tell apart processes of one kind."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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

# Between the ports of metrics of two processes of one kind.
METRICS_STEP = 100
EXECUTOR_STOP_SECONDS = 15.0
CONSOLE_STOP_SECONDS = 5.0
ENGINES = f"{PREFIX}ROUTER_ENGINES"


class LayoutError(Exception):
    """There is no such stack; the message is for people."""


class _Kind(NamedTuple):
    """A kind of process. serves: fields with the addresses of its gRPC servers, which tell its health."""

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


@dataclass(frozen=True)
class Process:
    """A process of a stack. Processes of one kind are told apart by a number behind a hyphen: executor-0, executor-1.

    own: settings that only this process has, as the variables are called without KVKEEP_ and in lower case. environ:
    its whole environment. settings: what it reads there.
    """

    name: str
    own: Mapping[str, object]
    environ: Mapping[str, str]
    settings: ProcessSettings

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    @property
    def module(self) -> str:
        """What `python -m` runs."""
        return _KINDS[self.kind].module

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it serves gRPC; none for one without health of its own."""
        return tuple(getattr(self.settings, field) for field in _KINDS[self.kind].serves)

    def field(self, name: str) -> str:
        """A setting as text; empty where it has none of this name."""
        return str(getattr(self.settings, name, ""))

    @property
    def drain_seconds(self) -> float:
        """How long running calls may go on when it is asked to end."""
        return float(getattr(self.settings, "drain_seconds", 0.0))

    @property
    def stop_seconds(self) -> float:
        """How long it may take to end."""
        return self.drain_seconds + _KINDS[self.kind].stop_seconds

    @property
    def listening(self) -> dict[str, str]:
        """Every address that it listens on, by the variable that chooses it and, where it has a number, its name."""
        of = f" of {self.name}" if self.name != self.kind else ""
        return {f"{variable}{of}": address for variable, address in self.settings.listening.items()}


def process(name: str, environ: Mapping[str, str], own: Mapping[str, object] | None = None, gpu: str = "") -> Process:
    """A process with the settings of an environment and its own. gpu: the only one that it sees; empty for all.

    Raises SettingsError.
    """
    own = own or {}
    whole = dict(environ) | {f"{PREFIX}{setting.upper()}": str(value) for setting, value in own.items()}
    if gpu:
        whole["CUDA_VISIBLE_DEVICES"] = gpu
    return Process(name, own, whole, _KINDS[name.partition("-")[0]].load(whole))


def single(environ: Mapping[str, str]) -> list[Process]:
    """The processes of one engine, in the order in which they need each other. Raises SettingsError."""
    return [process(name, environ) for name in ("cachemgr", "executor", "scheduler")]


def console(environ: Mapping[str, str], engines: Iterable[Process] = ()) -> list[Process]:
    """The console of these processes, unless it is off. Raises SettingsError."""
    made = process("console", {**environ, **_for_operators(list(engines))})
    return [made] if made.field("address") else []


def _for_operators(processes: Sequence[Process]) -> dict[str, str]:
    """Where kvctl finds the shards and the router of a fleet; nothing for a single engine."""
    fields = {"cachemgr": "cachemgr_admin_address", "router": "address"}
    found = {kind: [one.field(field) for one in processes if one.kind == kind] for kind, field in fields.items()}
    if not found["router"]:
        return {}
    return {"KVCTL_SERVER": ",".join(found["cachemgr"]), "KVCTL_ROUTER": found["router"][0]}


def fleet(environ: Mapping[str, str], engines: int, shards: int = 1) -> list[Process]:
    """Several engines on this machine behind a router, in the order in which they need each other.

    Engine n belongs to shard n modulo `shards`. The router is where the scheduler of a single engine would be, and the
    first shard where the cache manager would be; all others have sockets in the state folder. Engines share cores, GPUs
    and memory evenly. Raises LayoutError, SettingsError, AddressError.
    """
    if not 1 <= shards <= engines:
        raise LayoutError(f"{shards} shards for {engines} engines: each shard needs an engine, each engine a shard")
    if environ.get(ENGINES):
        raise LayoutError(f"{ENGINES} names engines that are not started here: leave it empty")
    folder = load(SchedulerSettings, environ).state_dir.expanduser().resolve() / "sockets"
    managers = [_shard(environ, number, folder) for number in range(shards)]
    made = [managers[number % shards] for number in range(engines)]
    executors = _executors(environ, made, folder)
    schedulers = [
        _scheduler(environ, number, manager, executor, folder)
        for number, (manager, executor) in enumerate(zip(made, executors, strict=True))
    ]
    return [*managers, *executors, *schedulers, _router(environ, schedulers)]


def _shard(environ: Mapping[str, str], number: int, folder: Path) -> Process:
    base = load(CachemgrSettings, environ)
    own: dict[str, object] = {"cachemgr_metrics_address": _moved(base, number)}
    if number:
        own["cachemgr_shard"] = number
        own["cachemgr_address"] = _socket(folder, f"cachemgr-{number}")
        own["cachemgr_admin_address"] = _socket(folder, f"admin-{number}")
        if log := base.operation_log:
            own["cachemgr_operation_log"] = log.with_name(f"{log.name}-{number}")
    return process(f"cachemgr-{number}", environ, own)


def _executors(environ: Mapping[str, str], managers: Sequence[Process], folder: Path) -> list[Process]:
    """One for each of these cache managers."""
    base = settings_from(environ)
    count = len(managers)
    gpus = _gpus(environ) if base.device in ("auto", "cuda") else []
    # Most that share a GPU, or the memory of the host.
    sharing = -(-count // len(gpus)) if gpus else count
    given = environ.get("KVKEEP_EXECUTOR_EXECUTOR_ID") or "executor"
    executors = []
    for number, manager in enumerate(managers):
        own: dict[str, object] = _manager_of(manager) | {
            "executor_executor_id": f"{given}-{number}",
            "executor_address": _socket(folder, f"executor-{number}"),
            "executor_metrics_address": _moved(base, number),
            "executor_free_memory_fraction": base.free_memory_fraction / sharing,
            "executor_threads": base.threads or max(1, len(os.sched_getaffinity(0)) // count),
        }
        gpu = gpus[number % len(gpus)] if gpus else ""
        executors.append(process(f"executor-{number}", environ, own, gpu))
    return executors


def _scheduler(environ: Mapping[str, str], number: int, manager: Process, executor: Process, folder: Path) -> Process:
    base = load(SchedulerSettings, environ)
    given = environ.get("KVKEEP_SCHEDULER_SCHEDULER_ID") or "scheduler"
    own = _manager_of(manager) | {
        "scheduler_scheduler_id": f"{given}-{number}",
        "scheduler_address": _socket(folder, f"scheduler-{number}"),
        "scheduler_http_address": "",
        "scheduler_metrics_address": _moved(base, number),
        "executor_address": executor.settings.executor_address,
    }
    return process(f"scheduler-{number}", environ, own)


def _router(environ: Mapping[str, str], schedulers: Iterable[Process]) -> Process:
    """It takes the places of a scheduler, unless it has been given others."""
    base = load(SchedulerSettings, environ)
    own = {
        "router_address": base.scheduler_address,
        "router_http_address": base.http_address,
    }
    own = {setting: value for setting, value in own.items() if f"{PREFIX}{setting.upper()}" not in environ}
    own["router_engines"] = ",".join(scheduler.settings.scheduler_address for scheduler in schedulers)
    return process("router", environ, own)


def _manager_of(manager: Process) -> dict[str, object]:
    """Where an engine finds its cache manager."""
    settings = manager.settings
    return {
        "cachemgr_address": settings.cachemgr_address,
        "cachemgr_admin_address": settings.cachemgr_admin_address,
    }


def _socket(folder: Path, name: str) -> str:
    return f"unix:{socket_in(folder, name)}"


def _moved(base: "CachemgrSettings | ExecutorSettings | SchedulerSettings", number: int) -> str:
    """Where the process of this number serves metrics."""
    if not base.metrics_address or not number:
        return base.metrics_address
    host, colon, port = base.metrics_address.rpartition(":")
    moved = int(port) + number * METRICS_STEP if int(port) else 0
    address = f"{host}{colon}{moved}"
    try:
        return addresses.validate(address)
    except ValueError as error:
        setting = f"{PREFIX}{base.process.upper()}_METRICS_ADDRESS"
        raise LayoutError(f"{setting}: number {number} would serve metrics at {address}, but it {error}") from None


def _gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that processes may use, by what CUDA calls them."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu.strip() not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
