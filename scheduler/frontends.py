"""Front ends in separate processes: starts them, runs their requests, and restarts them when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.http_server import bind
from scheduler.frontend.engine_service import EngineSource, PeerRequests
from scheduler.frontend.openai.server import SETTING
from scheduler.frontend.pipe import Frame, Pipe
from scheduler.settings import SchedulerSettings

# Cores for each front end, and most front ends. With fewer cores, a front end takes more from the executor and the step
# loop than it gives: `make bench-http-frontends`.
CORES_FOR_EACH, MOST_CHOSEN = 4, 4
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# As uvicorn's.
BACKLOG = 2048
# Pause before a front end is restarted, in seconds, at first and at most: it doubles each time, unless the previous
# front end served for LONG_SECONDS.
RESTART_SECONDS, LONGEST_RESTART_SECONDS, LONG_SECONDS = 0.2, 5.0, 30.0
# A front end that must end is killed after this many seconds: usually, and if it must hurry or has closed its pipe.
END_SECONDS, HURRIED_SECONDS = 8.0, 2.0
# Metrics to which front ends' counts are added: the scheduler does not see the front ends' HTTP requests, nor how their
# outputs end.
_COUNTED_THERE = frozenset(
    {
        "kvkeep_http_requests",
        "kvkeep_http_seconds",
        "kvkeep_http_in_flight",
        "kvkeep_http_refused_connections",
        "kvkeep_scheduler_requests",
        "kvkeep_scheduler_request_seconds",
        "kvkeep_scheduler_refused_requests",
    }
)

log = structlog.get_logger()


def available_cores() -> float:
    """Returns how many cores this process may use: those it is bound to, limited by its control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(float, _QUOTA.read_text().split())
        cores = min(cores, quota / period)
    return cores


def front_ends(settings: SchedulerSettings, cores: float) -> int:
    """Returns how many front ends to start; 0 if this process serves HTTP itself, or nothing serves HTTP."""
    if not settings.http_address:
        return 0
    if settings.frontends != "auto":
        return settings.frontends
    return min(MOST_CHOSEN, int(cores / CORES_FOR_EACH))


class FrontEndMetrics(Collector):
    """The metrics of a registry with what the front ends have counted, including those that have ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._own = registry
        # Front ends count in files here, so that nothing is lost when they are killed.
        self._folder = tempfile.TemporaryDirectory(prefix="kvkeep-frontends-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.serving = Gauge("kvkeep_scheduler_frontends", "Front ends that serve HTTP.", registry=registry)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        return self.summed(self._own.collect())

    def summed(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """Returns the scheduler's metric families with the front ends' values added."""
        theirs = {family.name: family for family in MultiProcessCollector(None, str(self.folder)).collect()}  # type: ignore[no-untyped-call]
        for family in families:
            yield _sum(family, theirs[family.name]) if family.name in _COUNTED_THERE & theirs.keys() else family

    def ended(self, pid: int) -> None:
        """Notes that a front end has ended; what it has counted stays."""
        mark_process_dead(pid, str(self.folder))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Removes the files."""
        self._folder.cleanup()


def _sum(ours: Metric, theirs: Metric) -> Metric:
    found: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in (*ours.samples, *theirs.samples):
        key = sample.name, frozenset(sample.labels.items())
        found[key] = sample._replace(value=sample.value + found[key].value) if key in found else sample
    summed = Metric(ours.name, ours.documentation, ours.type, ours.unit)
    summed.samples = list(found.values())
    return summed


class FrontEnds:
    """Several processes on one port. Each has a separate socket, which stays open while the process is restarted."""

    def __init__(
        self,
        count: int,
        settings: SchedulerSettings,
        scheduler: EngineSource,
        ready: asyncio.Event,
        metrics: FrontEndMetrics,
        environ: Mapping[str, str],
    ) -> None:
        """ready: set once the scheduler serves. environ: the environment of the processes, with the settings."""
        self.address = settings.http_address
        self._count = count
        self._settings = settings
        self._scheduler = scheduler
        self._ready = ready
        self._metrics = metrics
        self._environ = {**environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics.folder)}
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pipes: set[Pipe] = set()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Begins to listen, and starts the processes. Raises AddressError."""
        self._listeners = bind(
            self.address, self._count, insecure=self._settings.security.may_be_reached, setting=SETTING
        )
        self.address = f"{self.address.rpartition(':')[0]}:{self._listeners[0].getsockname()[1]}"
        for listener in self._listeners:
            # Connections wait in the backlog, even while the process is being restarted.
            listener.listen(BACKLOG)
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(self._count)]

    async def stop(self, *, hurried: bool = False) -> None:
        """Ends the processes once callers have their answers; after END_SECONDS, kills the rest. Removes the metrics.

        hurried: does not wait for callers, and kills after HURRIED_SECONDS.
        """
        self._stopping.set()
        for pipe in self._pipes:
            pipe.put(Frame.STOP, b"\1" if hurried else b"")
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=HURRIED_SECONDS if hurried else END_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for process in self._processes.values():
            log.warning("a front end was killed, as it did not end", pid=process.pid)
            process.kill()
            process.wait()
        for listener in self._listeners:
            listener.close()
        await asyncio.to_thread(self._metrics.close)

    async def _keep(self, number: int) -> None:
        """Runs a front end and restarts it whenever it ends."""
        pause = RESTART_SECONDS
        while True:
            started = time.monotonic()
            try:
                cause = await self._run(number)
            except OSError as error:
                cause = f"cannot be started: {error.strerror}"
            except Exception as error:
                # Whatever the error is, requests need a front end.
                log.exception("a front end failed", number=number)
                cause = f"the scheduler met an error of its own: {type(error).__name__}"
            if self._stopping.is_set():
                return
            pause = RESTART_SECONDS if time.monotonic() - started > LONG_SECONDS else pause
            log.error("a front end ended and is started again", number=number, cause=cause, seconds=pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                    return
            pause = min(2 * pause, LONGEST_RESTART_SECONDS)

    async def _run(self, number: int) -> str:
        """Runs a front end until it ends; returns how it ended."""
        process, connected = self._spawn(number)
        self._processes[number] = process
        pipe = await Pipe.over(connected)
        self._pipes.add(pipe)
        if self._stopping.is_set():
            pipe.put(Frame.STOP)
        try:
            await self._converse(pipe)
        except ConnectionError:
            # The front end has ended.
            pass
        except Exception:
            log.exception("a front end has sent what the scheduler cannot take in", number=number)
        finally:
            self._pipes.discard(pipe)
            pipe.close()
        status = await _ended(process)
        del self._processes[number]
        self._metrics.ended(process.pid)
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"

    def _spawn(self, number: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            passed = self._listeners[number].fileno(), theirs.fileno()
            process = subprocess.Popen(  # noqa: S603 - this program's own module
                [sys.executable, "-m", "scheduler.frontend", *map(str, passed), str(number)],
                env=self._environ,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                # A Ctrl-C in the terminal is for the scheduler.
                process_group=0,
            )
        return process, ours

    async def _converse(self, pipe: Pipe) -> None:
        """Serves a front end until it ends."""
        commands: asyncio.Queue[pb.StreamRequestsRequest | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(pipe, commands))
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({reading, ready}, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.is_set():
                await pipe.send(Frame.ENGINE, self._scheduler.engine.SerializeToString())
                with self._metrics.serving.track_inprogress():
                    await PeerRequests(self._scheduler.requests, None, _Peer(pipe)).run(_taken(commands))
            await reading
        finally:
            reading.cancel()
            ready.cancel()

    async def _read(self, pipe: Pipe, commands: asyncio.Queue[pb.StreamRequestsRequest | None]) -> None:
        try:
            while (frame := await pipe.read()) is not None:
                kind, content = frame
                match kind:
                    case Frame.METRICS:
                        pipe.put(kind, prometheus_client.generate_latest(self._metrics.registry))
                    case Frame.ABORT:
                        # Front ends have checked whose request it is.
                        count = self._scheduler.requests.abort(pb.AbortRequestsRequest.FromString(content))
                        pipe.put(kind, pb.AbortRequestsResponse(aborted_requests=count).SerializeToString())
                    case _:
                        commands.put_nowait(pb.StreamRequestsRequest.FromString(content))
        finally:
            commands.put_nowait(None)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process that has closed its pipe; kills it after HURRIED_SECONDS. Returns its status."""
    until = time.monotonic() + HURRIED_SECONDS
    while (status := process.poll()) is None:
        if time.monotonic() > until:
            process.kill()
        await asyncio.sleep(0.01)
    return status


class _Peer:
    """The front end at the other end of a session."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def peer(self) -> str:
        return "frontend"

    async def write(self, message: pb.StreamRequestsResponse) -> None:
        await self._pipe.send(Frame.REQUESTS, message.SerializeToString())


async def _taken(commands: asyncio.Queue[pb.StreamRequestsRequest | None]) -> AsyncIterator[pb.StreamRequestsRequest]:
    while (command := await commands.get()) is not None:
        yield command
