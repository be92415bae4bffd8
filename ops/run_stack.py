"""Runs Redis, cachemgr, executor, scheduler and the console on this machine until Ctrl-C: `make run-stack`."""

import contextlib
import fcntl
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Children become other programs at once: gRPC need not prepare itself for a fork. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from children import Child
from display import Display
from redis import Redis, RedisCluster, RedisError
from redis.cluster import ClusterNode
from redis.exceptions import RedisClusterException
from redis_server import RedisServerError, redis_child, redis_url, wait_until_answering
from supervisor import Service, ServiceFailedError, Supervisor

from cachemgr.settings import CachemgrSettings
from executor.settings import ExecutorSettings, settings_from
from kernels.cpu_decoder.build import NoCompilerError, find_compiler
from kvctl.console.settings import ConsoleSettings
from protos.rpc import addresses
from protos.rpc.addresses import AddressError
from protos.rpc.files import FolderError, prepare_folder
from protos.rpc.security import Security
from protos.rpc.settings import STACK_METRICS, ProcessSettings, cluster_nodes, load
from protos.rpc.startup import process_parser
from scheduler.settings import SchedulerSettings

ROOT = Path(__file__).resolve().parents[1]
TICK_SECONDS = 0.1
# On top of what a process itself grants to running calls.
STOP_MARGIN_SECONDS = 5.0
EXECUTOR_STOP_SECONDS = 15.0
CONSOLE_STOP_SECONDS = 5.0
DEFAULTS = {f"KVKEEP_{process.upper()}_METRICS_ADDRESS": address for process, address in STACK_METRICS.items()}


class StackError(Exception):
    """The stack cannot start; the message is for people."""


@dataclass(frozen=True)
class Settings:
    """The settings of all processes, which share addresses and folders."""

    scheduler: SchedulerSettings
    cachemgr: CachemgrSettings
    executor: ExecutorSettings
    console: ConsoleSettings

    @property
    def processes(self) -> tuple[ProcessSettings, ...]:
        """Those of each."""
        return self.scheduler, self.cachemgr, self.executor, self.console

    @property
    def listening(self) -> dict[str, str]:
        """Every address that will be listened on, by the variable that chooses it; "" is off."""
        return {name: address for process in self.processes for name, address in process.listening.items()}


def load_settings(environ: Mapping[str, str]) -> Settings:
    """What the processes will read. Raises SettingsError as they would."""
    return Settings(
        load(SchedulerSettings, environ),
        load(CachemgrSettings, environ),
        settings_from(environ),
        load(ConsoleSettings, environ),
    )


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Holds a state folder for this stack; the lock ends with the process. Raises StackError, FolderError."""
    prepare_folder(state_dir, "KVKEEP_STATE_DIR")
    with (state_dir / "run-stack.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise StackError(
                f"a stack runs with {state_dir} already (process {lock.read().strip() or 'unknown'}).\n"
                "Stop it, or give this one a folder and addresses of its own: KVKEEP_STATE_DIR, KVKEEP_…_ADDRESS."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def check_addresses(settings: Settings) -> None:
    """What the processes would find out one after the other, the executor when it has loaded its model.

    Raises AddressError for an address that two would have, or that other machines could reach without TLS; StackError
    that names every port that another program holds and the setting that moves ours.
    """
    addresses.check_distinct(settings.listening)
    securities = {process.process.upper(): process.security for process in settings.processes}
    taken = []
    for variable, address in settings.listening.items():
        if not address:
            continue
        security = securities[variable.split("_")[1]]
        addresses.prepare(address, insecure=security.may_be_reached, setting=variable)
        if addresses.socket_path(address) is not None:
            continue
        host, port = addresses.split_host_port(address)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            # As the servers do: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                taken.append(f"{address}: {error.strerror}; {variable} chooses another address")
    if taken:
        raise StackError("cannot listen on " + "\ncannot listen on ".join(taken))


def log_file(state_dir: Path, name: str) -> Path:
    """A fresh log; that of the run before is kept beside it."""
    log = state_dir / "logs" / f"{name}.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.old"))
    return log


def make_services(settings: Settings, environ: Mapping[str, str]) -> list[Service]:
    """The processes, in the order in which they need each other."""
    state_dir = settings.cachemgr.state_dir

    def child(name: str, stop_seconds: float, module: str = "") -> Child:
        log = log_file(state_dir, name)
        command = [sys.executable, "-m", module or name]
        return Child(command, environ, folder=ROOT, log=log, stop_seconds=stop_seconds + STOP_MARGIN_SECONDS)

    cachemgr, executor, scheduler = settings.cachemgr, settings.executor, settings.scheduler
    services = [
        Service(
            "cachemgr",
            child("cachemgr", cachemgr.drain_seconds),
            (cachemgr.cachemgr_address, cachemgr.cachemgr_admin_address),
            cachemgr.security,
        ),
        Service("executor", child("executor", EXECUTOR_STOP_SECONDS), (executor.executor_address,), executor.security),
        Service(
            "scheduler",
            child("scheduler", scheduler.drain_seconds),
            (scheduler.scheduler_address,),
            scheduler.security,
        ),
    ]
    if settings.console.address:
        services.append(Service("console", child("console", CONSOLE_STOP_SECONDS, "kvctl.console")))
    return services


def without_password(url: str) -> str:
    """The URL as it may be shown: a terminal is often a file."""
    return re.sub("//.*@", "//", url.partition("?")[0])


def redis_problem(url: str) -> str:
    """Why a Redis of the user's cannot be used now, or nothing."""
    try:
        first, nodes = cluster_nodes(url)
        seconds = {"socket_connect_timeout": 2, "socket_timeout": 2}
        if nodes:
            starts = [ClusterNode(host, port) for host, port in nodes]  # type: ignore[no-untyped-call]
            with RedisCluster.from_url(first, startup_nodes=starts, **seconds) as cluster:
                cluster.ping()
        else:
            with Redis.from_url(first, **seconds) as client:
                client.ping()
    except (RedisError, RedisClusterException, OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""


def compiler_problem(device: str) -> str:
    """Why steps on a CPU are slower here than they could be, and what to install; or nothing."""
    if device.startswith("cuda"):
        return ""
    try:
        find_compiler()
    except NoCompilerError as error:
        return f"{error}: on a CPU the executor serves several times slower without; install g++ (GCC 12 or newer)"
    return ""


def directions(settings: Settings, redis_url: str) -> str:
    """Where everything is, and what to try first."""
    scheduler, cachemgr, executor = settings.scheduler, settings.cachemgr, settings.executor
    scheme = "https" if scheduler.security.serves_tls else "http"
    rows = [
        ("scheduler", scheduler.scheduler_address, scheduler.metrics_address),
        *([("  http", f"{scheme}://{scheduler.http_address}/v1", "")] if scheduler.http_address else []),
        ("cachemgr", cachemgr.cachemgr_address, cachemgr.metrics_address),
        *([("  console", f"{scheme}://{settings.console.address}/", "")] if settings.console.address else []),
        ("  admin", cachemgr.cachemgr_admin_address, ""),
        ("executor", executor.executor_address, executor.metrics_address),
        ("redis", without_password(redis_url), ""),
    ]
    width = max(len(address) for _, address, _ in rows)
    lines = [
        f"  {name:<11}{address:<{width}}" + (f"  metrics {scheme}://{metrics}/metrics" if metrics else "")
        for name, address, metrics in rows
    ]
    folder = Path(sys.executable).parent
    folder = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    address = scheduler.scheduler_address
    path = addresses.socket_path(address)
    request = shlex.quote('{"text": "The capital of France is", "max_tokens": 8}')
    target = f"-unix -d {request} {path}" if path else f"-d {request} {address}"
    options = _grpcurl_options(scheduler.security)
    default = address == SchedulerSettings.model_fields["scheduler_address"].default
    lines += [
        f"  {'logs':<11}{cachemgr.state_dir / 'logs'}",
        "",
        "In a second terminal:" if Path.cwd() == ROOT else f"In a second terminal, in {ROOT}:",
        f"  {folder}/python -m scheduler.generate {'' if default else f'--address {address} '}"
        '"What is the capital of France?"',
        f"  {folder}/grpcurl {options} {target} generation.v1.GenerationService/StreamGenerate",
        "",
        "Ctrl-C stops the stack.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _grpcurl_options(security: Security) -> str:
    options = [f"-cacert {security.tls_ca_file}" if security.serves_tls else "-plaintext"]
    if security.tls_client_ca_file is not None:
        options.append(f"-cert {security.tls_cert_file} -key {security.tls_key_file}")
    return " ".join(options)


def run(settings: Settings, environ: dict[str, str], display: Display) -> int:
    """Runs the stack until a signal or until a process has failed for good; returns the exit status."""
    stopping, state_dir = threading.Event(), settings.cachemgr.state_dir
    services: list[Service] = []
    url = settings.cachemgr.redis_url
    if not url:
        redis = redis_child(state_dir, log_file(state_dir, "redis"))
        url = environ["KVKEEP_REDIS_URL"] = redis_url(state_dir)
        services.append(Service("redis", redis))
    supervisor = Supervisor(services, display.report)
    catch_signals(stopping, supervisor)
    begin = time.monotonic()
    status, announced = 0, False
    try:
        if services:
            display.expect(services[0])
            supervisor.start(services[0])
            wait_until_answering(redis, url)
        for service in make_services(settings, environ):
            services.append(service)
            display.expect(service)
            supervisor.start(service)
        while not stopping.wait(TICK_SECONDS):
            supervisor.tick()
            if supervisor.all_ready and not announced:
                announced = True
                display.ready(time.monotonic() - begin, directions(settings, url))
                if problem := compiler_problem(settings.executor.device):
                    display.warn(problem)
                if problem := redis_problem(url):
                    display.warn(f"redis does not answer, and a restart of cachemgr loses the cache: {problem}")
    except ServiceFailedError as error:
        display.failed(str(error), error.service.process.tail())
        status = 1
    finally:
        display.stopping(settings.scheduler.drain_seconds if announced else 0)
        supervisor.stop()
    return status


def catch_signals(stopping: threading.Event, supervisor: Supervisor) -> None:
    """The first signal stops in order, the second hurries, the third kills."""
    count = 0

    def handle(_number: int, _frame: object) -> None:
        nonlocal count
        count += 1
        stopping.set()
        if count == 2:
            supervisor.hurry()
        elif count > 2:
            supervisor.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


def main() -> int:
    """Reads the settings, takes the folder and runs."""
    process_parser(
        "ops/run_stack.py",
        "Runs Redis, cachemgr, executor, scheduler and the console on this machine until Ctrl-C,\n"
        "and restarts those that end. State and logs are in KVKEEP_STATE_DIR; KVKEEP_EXECUTOR_MODEL chooses the model.",
    ).parse_args()
    environ = DEFAULTS | dict(os.environ)
    settings = load_settings(environ)
    try:
        with locked(settings.cachemgr.state_dir):
            check_addresses(settings)
            return run(settings, environ, Display())
    except OSError as error:
        said = str(FolderError(settings.cachemgr.state_dir, "KVKEEP_STATE_DIR", error))
    except (StackError, FolderError, AddressError, RedisServerError) as error:
        said = str(error)
    print(f"run-stack: {said}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
