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
from collections.abc import Iterator, Sequence
from pathlib import Path

# Children become other programs at once: gRPC need not prepare itself for a fork. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import layout
from children import Child
from display import Display
from layout import LayoutError, Process
from redis import Redis, RedisCluster, RedisError
from redis.cluster import ClusterNode
from redis.exceptions import RedisClusterException
from redis_server import RedisServerError, redis_child, redis_url, wait_until_answering
from supervisor import Service, ServiceFailedError, Supervisor

from cachemgr.settings import CachemgrSettings
from executor import preflight
from executor.errors import CacheFileError, ModelError
from executor.settings import ExecutorSettings
from kernels.cpu_decoder.build import NoCompilerError, find_compiler
from protos.rpc import addresses
from protos.rpc.addresses import AddressError
from protos.rpc.files import FolderError, prepare_folder
from protos.rpc.security import Security
from protos.rpc.settings import STACK_METRICS, cluster_nodes, load
from protos.rpc.startup import process_parser
from scheduler.settings import SchedulerSettings

ROOT = Path(__file__).resolve().parents[1]
TICK_SECONDS = 0.1
# Seconds on top of the time that a process itself grants to running calls.
STOP_MARGIN_SECONDS = 5.0
DEFAULTS = {f"KVKEEP_{process.upper()}_METRICS_ADDRESS": address for process, address in STACK_METRICS.items()}


class StackError(Exception):
    """The stack cannot start; the message is for people."""


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
                "Stop that stack, or give this stack its own folder and addresses: KVKEEP_STATE_DIR, KVKEEP_…_ADDRESS."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def check_addresses(processes: Sequence[Process]) -> None:
    """Finds errors that the processes would find one after the other, the executor only after it has loaded its model.

    Raises AddressError for an address that two processes would have, or that other machines could reach without TLS;
    LayoutError for an impossible port; StackError for ports that another program holds, with the settings that choose
    other ports.
    """
    found = list(layout.listening(processes))
    addresses.check_distinct({setting: address for _, setting, address in found})
    taken = []
    for process, setting, address in found:
        if not address:
            continue
        addresses.prepare(address, insecure=process.settings.security.may_be_reached, setting=setting)
        if addresses.socket_path(address) is not None:
            continue
        host, port = addresses.split_host_port(address)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            # The servers do the same: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                taken.append(f"{address}: {error.strerror}; {setting} chooses another address")
    if taken:
        raise StackError("cannot listen on " + "\ncannot listen on ".join(taken))


def check_executors(processes: Sequence[Process]) -> None:
    """Finds errors that an executor would find after all others had started. Raises StackError."""
    for process in processes:
        if isinstance(process.settings, ExecutorSettings):
            try:
                preflight.check(process.settings, process.environ)
            except (ModelError, CacheFileError) as error:
                raise StackError(str(error)) from error


def log_file(state_dir: Path, name: str) -> Path:
    """Makes a new log; the log of the previous run stays beside it."""
    log = state_dir / "logs" / f"{name}.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.old"))
    return log


def make_service(process: Process) -> Service:
    """A process as the supervisor runs it."""
    child = Child(
        [sys.executable, "-m", process.module],
        process.environ,
        folder=ROOT,
        log=log_file(process.settings.state_dir, process.name),
        stop_seconds=process.stop_seconds + STOP_MARGIN_SECONDS,
    )
    return Service(process.name, child, process.addresses, process.settings.security)


def without_password(url: str) -> str:
    """The URL without its password, because the output may go to a file."""
    return re.sub("//.*@", "//", url.partition("?")[0])


def redis_problem(url: str) -> str:
    """Why Redis cannot be used now; empty if Redis answers."""
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
    """Why steps on a CPU are slower here than possible, and the package to install; empty if nothing is missing."""
    if device.startswith("cuda"):
        return ""
    try:
        find_compiler()
    except NoCompilerError as error:
        return f"{error}: on a CPU the executor is then several times slower; install g++ (GCC 12 or newer)"
    return ""


def front_of(processes: Sequence[Process]) -> Process:
    """The process that callers use."""
    kinds = {process.kind: process for process in processes}
    return kinds.get("router") or kinds["scheduler"]


def directions(processes: Sequence[Process]) -> str:
    """The addresses of everything, and the first commands to try."""
    front = front_of(processes)
    security, (address, *_) = front.settings.security, front.addresses
    scheme = "https" if security.serves_tls else "http"
    rows = list(_rows(processes, front, scheme))
    names, width = (max(len(row[column]) for row in rows) for column in (0, 1))
    names = max(names + 2, 11)
    lines = [
        f"  {name:<{names}}{address:<{width}}" + (f"  metrics {scheme}://{metrics}/metrics" if metrics else "")
        for name, address, metrics in rows
    ]
    folder = Path(sys.executable).parent
    folder = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    path = addresses.socket_path(address)
    request = shlex.quote('{"text": "The capital of France is", "max_tokens": 8}')
    target = f"-unix -d {request} {path}" if path else f"-d {request} {address}"
    options = _grpcurl_options(security)
    lines += [
        f"  {'logs':<{names}}{front.settings.state_dir / 'logs'}",
        "",
        "In a second terminal:" if Path.cwd() == ROOT else f"In a second terminal, in {ROOT}:",
        f"  {generate_command(folder, address)}",
        f"  {folder}/grpcurl {options} {target} generation.v1.GenerationService/StreamGenerate",
        *([f"  {folder}/kvctl engines --router {address}"] if front.kind == "router" else []),
        "",
        "Ctrl-C stops the stack.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _rows(processes: Sequence[Process], front: Process, scheme: str) -> Iterator[tuple[str, str, str]]:
    """Name, address and metrics address of everything, with the address for callers first."""
    pages = [one.field("address") for one in processes if one.kind == "console"]
    for process in sorted(processes, key=lambda one: (one is not front, one.kind != "cachemgr")):
        if process.kind == "console":
            continue
        first, *others = process.addresses
        yield process.name, first, process.field("metrics_address")
        if process is front and (http := process.field("http_address")):
            yield "  http", f"{scheme}://{http}/v1", ""
        if process.kind == "cachemgr" and pages:
            yield "  console", f"{scheme}://{pages.pop()}/", ""
        yield from (("  admin", other, "") for other in others)
    yield "redis", without_password(processes[0].settings.redis_url), ""


def generate_command(folder: Path, address: str) -> str:
    """A command that asks the model a question. folder: of this Python's programs, relative to the checkout."""
    prompt = '"What is the capital of France?"'
    default = address == SchedulerSettings.model_fields["scheduler_address"].default
    option = "" if default else f"--address {address}"
    if folder == Path(".venv/bin"):
        return f"make generate PROMPT={prompt}" + (f' ARGS="{option}"' if option else "")
    return " ".join(filter(None, (f"{folder}/python -m scheduler.generate", option, prompt)))


def _grpcurl_options(security: Security) -> str:
    options = [f"-cacert {security.tls_ca_file}" if security.serves_tls else "-plaintext"]
    if security.tls_client_ca_file is not None:
        options.append(f"-cert {security.tls_cert_file} -key {security.tls_key_file}")
    return " ".join(options)


def run(processes: Sequence[Process], redis: Child | None, display: Display) -> int:
    """Runs the stack until a signal or until a process has failed for good; returns the exit status.

    redis: the server to start first; None if Redis runs elsewhere.
    """
    stopping, front, manager = threading.Event(), front_of(processes), processes[0]
    url = manager.settings.redis_url
    services: list[Service] = []
    supervisor = Supervisor(services, display.report)
    catch_signals(stopping, supervisor)
    begin = time.monotonic()
    status, announced = 0, False
    try:
        if redis is not None:
            services.append(Service("redis", redis))
            display.expect(services[0])
            supervisor.start(services[0])
            wait_until_answering(redis, url)
        for process in processes:
            service = make_service(process)
            services.append(service)
            display.expect(service)
            supervisor.start(service)
        while not stopping.wait(TICK_SECONDS):
            supervisor.tick()
            if supervisor.all_ready and not announced:
                announced = True
                display.ready(time.monotonic() - begin, directions(processes))
                device = next(one.field("device") for one in processes if one.kind == "executor")
                if problem := compiler_problem(device):
                    display.warn(problem)
                if problem := redis_problem(url):
                    display.warn(f"redis does not answer, and a restart of cachemgr loses the cache: {problem}")
    except ServiceFailedError as error:
        display.failed(str(error), error.service.process.tail())
        status = 1
    finally:
        display.stopping(front.drain_seconds if announced else 0)
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
    parser = process_parser(
        "ops/run_stack.py",
        "Runs Redis, cachemgr, executor, scheduler and the console on this machine until Ctrl-C,\n"
        "and restarts processes that end. KVKEEP_STATE_DIR has state and logs; KVKEEP_EXECUTOR_MODEL names the model.",
    )
    parser.add_argument("--model", metavar="MODEL", help="a folder, a GGUF file or a hub id, as KVKEEP_EXECUTOR_MODEL")
    parser.add_argument(
        "--engines", type=int, metavar="N", help="run N schedulers and executors, and a router in front"
    )
    parser.add_argument(
        "--shards", type=int, metavar="N", help="divide the engines between N cache managers; by default one has all"
    )
    parser.add_argument(
        "--policy", metavar="NAME", help="how the router chooses an engine, instead of KVKEEP_ROUTER_POLICY"
    )
    given = parser.parse_args()
    for option in ("shards", "policy"):
        if getattr(given, option) is not None and given.engines is None:
            parser.error(f"--{option} is of several engines: give --engines, too")
    environ = DEFAULTS | dict(os.environ)
    if given.policy is not None:
        environ["KVKEEP_ROUTER_POLICY"] = given.policy
    if given.model is not None:
        environ["KVKEEP_EXECUTOR_MODEL"] = given.model
    settings = load(CachemgrSettings, environ)
    try:
        if not settings.redis_url:
            environ["KVKEEP_REDIS_URL"] = redis_url(settings.state_dir)
        one = given.engines is None
        engines = layout.single(environ) if one else layout.fleet(environ, given.engines, given.shards or 1)
        processes = engines + layout.console(environ, engines)
        with locked(settings.state_dir):
            check_addresses(processes)
            check_executors(processes)
            log = log_file(settings.state_dir, "redis")
            redis = None if settings.redis_url else redis_child(settings.state_dir, log)
            return run(processes, redis, Display())
    except OSError as error:
        said = str(FolderError(settings.state_dir, "KVKEEP_STATE_DIR", error))
    except (StackError, LayoutError, FolderError, AddressError, RedisServerError) as error:
        said = str(error)
    print(f"run-stack: {said}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
