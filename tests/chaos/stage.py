"""The real stack and all its disturbances: processes that die and start again, connections that fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.meddling import Meddling
from tests.chaos.proxies import GrpcProxy, SocketProxy
from tests.stack import MODULES, FleetStack, Stack
from tests.support.local_redis import LocalRedis
from tests.support.patience import patience
from tests.support.ports import free_address

REDIS = "redis"
PROCESSES = (*MODULES, REDIS)
# Time limits until a started process serves, and until a process that was asked to end has ended.
START_SECONDS = patience(60)
STOP_SECONDS = patience(20)
# A supervisor's pause between the end of a process and its next start.
RESTART_SECONDS = 0.2
LOOK_SECONDS = 0.05
# Blocks of the default model in float32 take 737 kB.
HOST_BYTES, DISK_BYTES = 192 << 20, 384 << 20
# Sizes of a fleet.
ENGINES, SHARDS, ROUTERS = 3, 2, 2
STUB, STUB_STEP_SECONDS = "tests.chaos.stub_executor", 0.05
# 256 blocks, which take no memory.
STUB_HOST_BYTES = 512 << 20


@dataclasses.dataclass
class Absence:
    """When a process did not serve, on the monotonic clock. The end is infinite while the process is away."""

    begin: float
    end: float = float("inf")
    # The time of its restart.
    started: float = float("inf")
    # Whether the process was asked to end, so that it drained and the other processes knew.
    asked: bool = False


class Stage:
    """Processes, the proxies between them and a separate Redis. Use it in an async with statement.

    Make it with `single` or `fleet`. `failures` takes everything that no disturbance explains.
    """

    def __init__(self, stack: Stack, seed: int, tell: Callable[[str], None]) -> None:
        self.stack = stack
        # Where each process serves metrics.
        self.metrics: dict[str, str] = {}
        self.meddling = Meddling(random.Random(f"meddling {seed}"))
        self.failures: list[str] = []
        self.names = (*stack.modules, REDIS)
        self.absences: dict[str, list[Absence]] = {name: [] for name in self.names}
        # The times of each process's pauses.
        self.pauses: dict[str, list[Absence]] = {name: [] for name in self.names}
        self._tell = tell
        folder = stack.folder
        self._redis = LocalRedis(folder / "redis-state")
        self.proxies: list[GrpcProxy] = []
        # Byte proxies by name: REDIS is the way of all cache managers to Redis.
        self.links: dict[str, SocketProxy] = {}
        redis = f"unix://{self.link(REDIS, self._redis.url)}"
        for name in stack.modules:
            if name.partition("-")[0] == "cachemgr":
                stack.own.setdefault(name, {})["redis_url"] = redis
        self.memory = Path("/dev/shm", folder.name)
        self._changing = {name: asyncio.Lock() for name in self.names}
        # The number of present pauses by process number: a pause may begin during another pause.
        self._paused: Counter[int] = Counter()
        self._watching: asyncio.Task[None] | None = None

    def link(self, name: str, target: object) -> Path:
        """Puts a proxy in front of a unix socket, unix:/path or unix:///path; returns the proxy's path."""
        path = Path(str(target).removeprefix("unix:"))
        address = self.stack.folder / f"link-{len(self.links)}.sock"
        self.links[name] = SocketProxy(address, path)
        return address

    async def __aenter__(self) -> Self:
        try:
            for start in [proxy.start for proxy in self.proxies] + [link.start for link in self.links.values()]:
                await start()
            for name in self.stack.modules:
                self.stack.start(name)
            for name in self.stack.modules:
                await self.until_serving(name)
        except BaseException:
            await self._stop()
            raise
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            print(self.stack.logs(), file=sys.stderr)
        await self._stop()

    async def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for pid in self._paused:
            os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(self.stack.stop)
        for stop in [proxy.stop for proxy in self.proxies] + [link.stop for link in self.links.values()]:
            await stop()
        await asyncio.to_thread(self._redis.stop)
        shutil.rmtree(self.memory, ignore_errors=True)

    # Processes

    def pid(self, name: str) -> int:
        """Id of a running process."""
        return self._redis.pid if name == REDIS else self.stack.pid(name)

    def redis(self) -> Redis:
        """A client that bypasses the proxies."""
        return Redis.from_url(self._redis.url, socket_connect_timeout=patience(1), socket_timeout=patience(1))

    async def end(self, name: str, number: int = signal.SIGKILL) -> Absence:
        """Sends a process a signal that ends it, and waits for its end."""
        absence = Absence(time.monotonic(), asked=number == signal.SIGTERM)
        self.absences[name].append(absence)
        os.kill(self.pid(name), number)
        deadline = absence.begin + STOP_SECONDS
        while not self._ended(name):
            if self._paused[self.pid(name)]:
                # A paused process gets the signal when it continues.
                deadline = time.monotonic() + STOP_SECONDS
            if time.monotonic() > deadline:
                self.failures.append(f"{name} did not end within {STOP_SECONDS:.0f} s of {signal.Signals(number).name}")
                os.kill(self.pid(name), signal.SIGKILL)
                deadline = float("inf")
            await asyncio.sleep(LOOK_SECONDS / 5)
        return absence

    async def begin(self, name: str, absence: Absence) -> None:
        """Starts a process that has ended, and waits until it serves."""
        absence.started = time.monotonic()
        if name == REDIS:
            self._redis.start()
        else:
            self.stack.start(name)
        await self.until_serving(name)
        absence.end = time.monotonic()

    async def restart(self, name: str, number: int = signal.SIGKILL, away: float = RESTART_SECONDS) -> Absence:
        """Ends a process and starts it again after `away` seconds. Each process has at most one restart at a time."""
        async with self._changing[name]:
            absence = await self.end(name, number)
            await asyncio.sleep(away)
            await self.begin(name, absence)
            return absence

    async def pause(self, name: str, seconds: float) -> None:
        """Stops a process for some time; it may be killed in the meantime."""
        async with self._changing[name]:
            pid = self.pid(name)
            os.kill(pid, signal.SIGSTOP)
        self._paused[pid] += 1
        pause = Absence(time.monotonic())
        self.pauses[name].append(pause)
        try:
            await asyncio.sleep(seconds)
        finally:
            pause.end = time.monotonic()
            self._paused[pid] -= 1
            if not self._paused[pid]:
                del self._paused[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def until_serving(self, name: str) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(START_SECONDS):
            while not await self._is_serving(name):
                await asyncio.sleep(LOOK_SECONDS)

    async def _is_serving(self, name: str) -> bool:
        if name == REDIS:
            try:
                async with self.redis() as redis:
                    return bool(await redis.ping())
            except (RedisError, OSError):
                return False
        address = str(self.stack.address(name))
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=patience(1))
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _ended(self, name: str) -> str:
        if name == REDIS:
            return "" if self._redis.is_running else "ended"
        return self.stack.ended(name)

    async def _watch(self) -> None:
        """No process may end by itself. A process that does is started again, so that the run can go on."""
        while True:
            for name in self.names:
                if not self._changing[name].locked() and (how := self._ended(name)):
                    self.failures.append(f"{name} {how} by itself")
                    self._tell(self.failures[-1])
                    async with self._changing[name]:
                        absence = Absence(time.monotonic())
                        self.absences[name].append(absence)
                        await self.begin(name, absence)
            await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def shifted(self, name: str, seconds: float) -> AsyncIterator[None]:
        """Within it, starts of a process have the wall clock shifted by `seconds`."""
        modules, own = self.stack.modules, self.stack.variables
        self.stack.modules = {**modules, name: "tests.chaos.shifted_clock"}
        self.stack.variables = own | {"SHIFTED_MODULE": modules[name], "SHIFT_SECONDS": str(seconds)}
        try:
            yield
        finally:
            self.stack.modules, self.stack.variables = modules, own

    # Limits

    async def fill_redis(self, full: bool) -> None:
        """Redis refuses writes for lack of memory, or no longer does."""
        # If Redis is away or paused, this is due to another disturbance; after a restart it has no limit.
        with contextlib.suppress(RedisError, OSError):
            async with self.redis() as redis:
                await redis.config_set("maxmemory-policy", "noeviction")
                await redis.config_set("maxmemory", 1 if full else 0)

    async def empty_redis(self) -> None:
        """Redis loses all its data."""
        # If Redis is away or paused, this is due to another disturbance.
        with contextlib.suppress(RedisError, OSError):
            async with self.redis() as redis:
                await redis.flushall()

    def limit_files(self, size: int | None, name: str = "executor") -> None:
        """A process cannot write to files beyond `size` bytes, or can again if `size` is None."""
        pid = self.pid(name)
        bound = resource.RLIM_INFINITY if size is None else size
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (bound, resource.RLIM_INFINITY))

    # Observations

    def absent(self, name: str, begin: float, end: float) -> bool:
        """Whether a process was away at any time between `begin` and `end`."""
        return _within(self.absences[name], begin, end)

    def silent(self, name: str, begin: float, end: float) -> bool:
        """Whether a process was away or paused at any time between `begin` and `end`."""
        return self.absent(name, begin, end) or _within(self.pauses[name], begin, end)

    def starting_for(self) -> float:
        """Of the processes that do not serve yet, the longest time since a start, in seconds."""
        now = time.monotonic()
        return max((now - one.started for ones in self.absences.values() for one in ones if one.end > now), default=0.0)

    def keep_logs(self, folder: Path) -> None:
        """Copies every log to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in self.stack.modules:
            if self.stack.log_path(name).exists():
                shutil.copy(self.stack.log_path(name), folder)


def _within(absences: Iterable[Absence], begin: float, end: float) -> bool:
    return any(one.begin <= end and begin <= one.end for one in absences)


def single(seed: int, *, proxied: bool, tell: Callable[[str], None] = lambda _: None, **settings: object) -> Stage:
    """A stage with one engine. proxied: whether messages pass through proxies."""
    metrics = {name: free_address() for name in MODULES}
    addresses: dict[str, object] = {f"{name}_metrics_address": address for name, address in metrics.items()}
    stack = Stack(**(addresses | settings))
    stage = Stage(stack, seed, tell)
    stage.metrics = metrics
    if proxied:
        for name, other, target in (
            ("scheduler", "cachemgr", stack.cachemgr),
            ("scheduler", "executor", stack.executor),
            ("executor", "cachemgr", stack.cachemgr),
        ):
            address = f"unix:{stack.folder}/{name}-to-{other}.sock"
            stage.proxies.append(GrpcProxy(address, target, stage.meddling))
            stack.own.setdefault(name, {})[f"{other}_address"] = address
    stack.own.setdefault("executor", {}).update(
        executor_host_cache_size=HOST_BYTES,
        executor_host_cache_dir=stage.memory,
        executor_disk_cache_size=DISK_BYTES,
        executor_disk_cache_dir=stack.folder / "blocks",
    )
    return stage


def shard_of(engine: int) -> int:
    """The shard of an engine in a fleet."""
    return engine % SHARDS


def engines_of(shard: int) -> list[int]:
    """The engines of a shard in a fleet."""
    return [engine for engine in range(ENGINES) if shard_of(engine) == shard]


def fleet(seed: int, *, real: bool, tell: Callable[[str], None] = lambda _: None, **settings: object) -> Stage:
    """A stage with ENGINES engines, SHARDS shards with one Redis, and ROUTERS routers, and a proxy on each way.

    real: with executors that run the default model. All routers follow the events of a shard on the same way.
    """
    stack = FleetStack(engines=ENGINES, shards=SHARDS, **settings)
    modules = {name: module for name, module in stack.modules.items() if name != "router"}
    if not real:
        modules |= {f"executor-{number}": STUB for number in range(ENGINES)}
    stack.modules = modules | {f"router-{number}": stack.modules["router"] for number in range(ROUTERS)}
    stage, own = Stage(stack, seed, tell), stack.own
    events = [f"unix:{stage.link(events_link(shard), admin_of(stack, shard))}" for shard in range(SHARDS)]
    for engine in range(ENGINES):
        shard = shard_of(engine)
        manager = f"unix:{stage.link(shard_link(engine), stack.address(f'cachemgr-{shard}'))}"
        for name in (f"executor-{engine}", f"scheduler-{engine}"):
            own[name] |= {"cachemgr_address": manager, "cachemgr_admin_address": events[shard]}
        if not real:
            own[f"executor-{engine}"]["executor_stub_step_seconds"] = STUB_STEP_SECONDS
        own[f"executor-{engine}"] |= {
            "executor_host_cache_size": HOST_BYTES if real else STUB_HOST_BYTES,
            "executor_host_cache_dir": stage.memory,
        }
    for shard in range(SHARDS):
        name = f"cachemgr-{shard}"
        own[name]["cachemgr_metrics_address"] = stage.metrics[name] = free_address()
    for router in range(ROUTERS):
        name = f"router-{router}"
        stage.metrics[name] = free_address()
        engines = [
            f"unix:{stage.link(engine_link(router, engine), stack.address(f'scheduler-{engine}'))}"
            for engine in range(ENGINES)
        ]
        own[name] = {
            "router_address": f"unix:{stack.folder}/{name}.sock",
            "router_http_address": "",
            "router_metrics_address": stage.metrics[name],
            "router_engines": ",".join(engines),
            "router_router_id": name,
        }
    return stage


def admin_of(stack: Stack, shard: int) -> str:
    """Where a shard of a fleet serves operators."""
    return str(stack.own[f"cachemgr-{shard}"].get("cachemgr_admin_address", stack.admin))


def events_link(shard: int) -> str:
    """Name of the way from all routers to a shard's events."""
    return f"routers to events of cachemgr-{shard}"


def shard_link(engine: int) -> str:
    """Name of the way from an engine to its shard."""
    return f"engine-{engine} to cachemgr-{shard_of(engine)}"


def engine_link(router: int, engine: int) -> str:
    """Name of the way from a router to an engine."""
    return f"router-{router} to engine-{engine}"
