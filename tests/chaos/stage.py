"""The real stack with everything that can be done to it: processes that die and start again, connections that fail."""

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
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.meddling import Meddling
from tests.chaos.proxies import GrpcProxy, SocketProxy
from tests.stack import MODULES, Stack, free_address
from tests.support.local_redis import LocalRedis

REDIS = "redis"
PROCESSES = (*MODULES, REDIS)
# Until a process that was started serves, or one that was asked to end has ended.
START_SECONDS = 60.0
STOP_SECONDS = 20.0
# Between the end of a process and its next start, as a supervisor takes.
RESTART_SECONDS = 0.2
LOOK_SECONDS = 0.05
# Blocks of the default model in float32 take 737 kB.
HOST_BYTES, DISK_BYTES = 192 << 20, 384 << 20


@dataclasses.dataclass
class Absence:
    """When a process did not serve, on the monotonic clock; how long is not known while it is away."""

    begin: float
    end: float = float("inf")
    # When it was started again.
    started: float = float("inf")
    # Whether others knew: it was asked to end and drained.
    asked: bool = False


class Stage:
    """Processes, the proxies between them and a Redis of its own. Use it in an async with statement.

    proxied: whether messages pass through proxies. `failures` takes what no disturbance explains.
    """

    def __init__(
        self,
        seed: int,
        *,
        proxied: bool,
        tell: Callable[[str], None] = lambda _: None,
        **settings: object,
    ) -> None:
        self.metrics = {name: free_address() for name in MODULES}
        addresses: dict[str, object] = {f"{name}_metrics_address": address for name, address in self.metrics.items()}
        self.stack = Stack(**(addresses | settings))
        self.meddling = Meddling(random.Random(f"meddling {seed}"))
        self.failures: list[str] = []
        self.absences: dict[str, list[Absence]] = {name: [] for name in PROCESSES}
        self._tell = tell
        folder = self.stack.folder
        self._redis = LocalRedis(folder / "redis-state")
        self.redis_proxy = SocketProxy(folder / "redis.sock", Path(self._redis.url.removeprefix("unix://")))
        self.proxies: list[GrpcProxy] = []
        self.stack.own["cachemgr"] = {"redis_url": f"unix://{self.redis_proxy.address}"}
        if proxied:
            for name, other, target in (
                ("scheduler", "cachemgr", self.stack.cachemgr),
                ("scheduler", "executor", self.stack.executor),
                ("executor", "cachemgr", self.stack.cachemgr),
            ):
                address = f"unix:{folder}/{name}-to-{other}.sock"
                self.proxies.append(GrpcProxy(address, target, self.meddling))
                self.stack.own.setdefault(name, {})[f"{other}_address"] = address
        self._memory = Path("/dev/shm", folder.name)
        self.stack.own.setdefault("executor", {}).update(
            executor_host_cache_size=HOST_BYTES,
            executor_host_cache_dir=self._memory,
            executor_disk_cache_size=DISK_BYTES,
            executor_disk_cache_dir=folder / "blocks",
        )
        self._changing = {name: asyncio.Lock() for name in PROCESSES}
        # By process number: how many pauses last. One may begin while another lasts.
        self._paused: Counter[int] = Counter()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.redis_proxy.start()
            for proxy in self.proxies:
                await proxy.start()
            for name in MODULES:
                self.stack.start(name)
            for name in MODULES:
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
        for proxy in self.proxies:
            await proxy.stop()
        await self.redis_proxy.stop()
        await asyncio.to_thread(self._redis.stop)
        shutil.rmtree(self._memory, ignore_errors=True)

    # Processes

    def pid(self, name: str) -> int:
        """Number of a process that is there."""
        return self._redis.pid if name == REDIS else self.stack.pid(name)

    def redis(self) -> Redis:
        """A client that passes no proxy."""
        return Redis.from_url(self._redis.url, socket_connect_timeout=1, socket_timeout=1)

    async def end(self, name: str, number: int = signal.SIGKILL) -> Absence:
        """Sends a process a signal that ends it, and waits for that."""
        absence = Absence(time.monotonic(), asked=number == signal.SIGTERM)
        self.absences[name].append(absence)
        os.kill(self.pid(name), number)
        deadline = absence.begin + STOP_SECONDS
        while not self._ended(name):
            if self._paused[self.pid(name)]:
                # It gets the signal once it continues.
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
        """Ends a process and starts it again after `away` seconds. One at a time for each process."""
        async with self._changing[name]:
            absence = await self.end(name, number)
            await asyncio.sleep(away)
            await self.begin(name, absence)
            return absence

    async def pause(self, name: str, seconds: float) -> None:
        """Stops a process as if the machine had forgotten it; it may be killed meanwhile."""
        async with self._changing[name]:
            pid = self.pid(name)
            os.kill(pid, signal.SIGSTOP)
        self._paused[pid] += 1
        try:
            await asyncio.sleep(seconds)
        finally:
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
        address = getattr(self.stack, name)
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _ended(self, name: str) -> str:
        if name == REDIS:
            return "" if self._redis.is_running else "ended"
        return self.stack.ended(name)

    async def _watch(self) -> None:
        """Nothing may end by itself; what does is started again, so that the rest can be seen, too."""
        while True:
            for name in PROCESSES:
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
        """Within it a process starts with its wall clock shifted by so many seconds."""
        modules, own = self.stack.modules, self.stack.variables
        self.stack.modules = {**modules, name: "tests.chaos.shifted_clock"}
        self.stack.variables = own | {"SHIFTED_MODULE": modules[name], "SHIFT_SECONDS": str(seconds)}
        try:
            yield
        finally:
            self.stack.modules, self.stack.variables = modules, own

    # Limits

    async def fill_redis(self, full: bool) -> None:
        """Redis refuses writes for want of memory, or no longer."""
        # One that is away, or paused, is another disturbance's; one that starts again has no limit.
        with contextlib.suppress(RedisError, OSError):
            async with self.redis() as redis:
                await redis.config_set("maxmemory-policy", "noeviction")
                await redis.config_set("maxmemory", 1 if full else 0)

    def limit_files(self, size: int | None, name: str = "executor") -> None:
        """A process cannot write to files behind so many bytes, or can again."""
        pid = self.pid(name)
        bound = resource.RLIM_INFINITY if size is None else size
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (bound, resource.RLIM_INFINITY))

    # What is seen

    def absent(self, name: str, begin: float, end: float) -> bool:
        """Whether a process was away at any time between."""
        return any(one.begin <= end and begin <= one.end for one in self.absences[name])

    def starting_for(self) -> float:
        """Seconds since the start of the process that has taken longest to serve, of those that do not yet."""
        now = time.monotonic()
        return max((now - one.started for ones in self.absences.values() for one in ones if one.end > now), default=0.0)

    def keep_logs(self, folder: Path) -> None:
        """Copies every log to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in MODULES:
            if self.stack.log_path(name).exists():
                shutil.copy(self.stack.log_path(name), folder)
