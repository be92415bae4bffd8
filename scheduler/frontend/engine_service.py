"""The gRPC service for routers: a stream of requests, with one command per message, and of outputs.

A message to the router has outputs of many requests.

Front ends in separate processes have the same stream, over a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc import tracing
from protos.rpc.errors import InvalidField, ServiceError, UnexpectedError, to_status
from scheduler.frontend.access_log import AccessLog, GenerationRecord
from scheduler.frontend.grpc_service import Context
from scheduler.frontend.output import Generation, Stream
from scheduler.frontend.requests import CACHE_MANAGER_SILENT, EXECUTOR_SILENT, RequestTable, RequestTableSource

ENGINE_SERVICE = "generation.v1.EngineService"
# Seconds between checks of the load, and most seconds between two messages with the load.
LOADS_SECONDS, HEARTBEAT_SECONDS = 0.1, 0.5
# A neighbour's silence is sent whenever it has grown by this many seconds.
SILENCE_STEP = 0.25
# How long the last message may take if the router no longer reads.
WRITE_SECONDS = 1.0

log = structlog.get_logger()


class EngineSource(RequestTableSource, Protocol):
    """A process that has a request table with its own engine once its neighbours are available."""

    @property
    def engine(self) -> pb.GetEngineResponse:
        """Raises NotReadyError until the request table exists."""


class Peer(Protocol):
    """The other end of a session: a gRPC call, or a front end."""

    def peer(self) -> str:
        """Names the other end for the access log: the address of a gRPC peer."""

    async def write(self, message: pb.StreamRequestsResponse) -> None:
        """Sends a message; waits while too much is unread."""


class EngineService(rpc.EngineServiceServicer):
    """Served from the start; every call is answered with UNAVAILABLE while there is no request table."""

    def __init__(self, source: EngineSource, access_log: AccessLog) -> None:
        self._source = source
        self._access_log = access_log

    async def GetEngine(self, _request: pb.GetEngineRequest, _context: Context) -> pb.GetEngineResponse:  # noqa: N802
        return self._source.engine

    async def StreamRequests(  # type: ignore[override]  # noqa: N802
        self, commands: AsyncIterator[pb.StreamRequestsRequest], context: Context
    ) -> None:
        """Writes to the context instead of yielding: a session reads and writes at the same time."""
        await PeerRequests(self._source.requests, self._access_log, context).run(commands)


@dataclass(slots=True)
class _Running:
    """A request of a router. introduced: whether its first output, with its usage, was taken."""

    generation: Generation
    introduced: bool = False
    # Set once the last output, or the error, is taken.
    done: asyncio.Event = field(default_factory=asyncio.Event)


class PeerRequests:
    """The requests of one router or front end. Each has a task; one more task writes all output."""

    def __init__(self, requests: RequestTable, access_log: AccessLog | None, context: Peer) -> None:
        """access_log: None if the other end belongs to this scheduler and records its requests itself."""
        self._requests = requests
        self._access_log = access_log
        self._context = context
        # By request_id.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, _Running] = {}
        self._failures: list[pb.RequestFailure] = []
        # Set if there is output or a failure, or the stream is over.
        self._ready = asyncio.Event()
        self._is_over = False
        # What was sent last: the load, the obstacle and which neighbours are silent, the adapters, rounded silences.
        self._said: tuple[object, ...] | None = None
        self._loads_at = 0.0

    async def run(self, commands: AsyncIterator[pb.StreamRequestsRequest]) -> None:
        """Serves until the router ends the stream.

        Raises InvalidField for a command without content, and for a start without a request id or with the id of a
        running request. Raises UnexpectedError if output can no longer be written because of a defect.
        """
        writing, reading = asyncio.create_task(self._write()), asyncio.create_task(self._read(commands))
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and (error := writing.exception()) is not None:
                log.error("a session with a router failed", exc_info=error)
                raise UnexpectedError("internal error of the engine: see the log of the engine")
            await reading
        finally:
            self._is_over = True
            self._ready.set()
            tasks = [reading, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            try:
                # A write that is cancelled halfway would leave the call without an end.
                await asyncio.wait({writing}, timeout=WRITE_SECONDS)
            finally:
                # Even if the call is cancelled again during the wait: no task outlives its session.
                writing.cancel()
                await asyncio.gather(writing, *tasks, return_exceptions=True)

    async def _read(self, commands: AsyncIterator[pb.StreamRequestsRequest]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    self._start(command.start)
                case "cancel":
                    if task := self._tasks.get(command.cancel.request_id):
                        task.cancel()
                case _:
                    raise InvalidField("command", "is missing: give start or cancel")

    def _start(self, message: pb.StartRequest) -> None:
        name = message.request.request_id
        if not name:
            raise InvalidField("start.request.request_id", "must not be empty")
        if name in self._tasks:
            raise InvalidField("start.request.request_id", "is that of a running request")
        self._tasks[name] = asyncio.create_task(self._run(name, message))
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name))

    async def _run(self, name: str, message: pb.StartRequest) -> None:
        tracing.receive(message.traceparent)
        try:
            if self._access_log is None:
                await self._generate(name, message)
                return
            with (
                self._access_log.call(self._context.peer(), generating=True),
                self._access_log.generation(message.request, self._requests.model.name) as record,
            ):
                await self._generate(name, message, record)
        except ServiceError as error:
            self._fail(name, error, is_refused=name not in self._running)
        except Exception:
            log.exception("a request of a router failed")
            cause = UnexpectedError("internal error of the engine: see the log of the engine")
            self._fail(name, cause, is_refused=name not in self._running)
        finally:
            self._running.pop(name, None)

    async def _generate(self, name: str, message: pb.StartRequest, record: GenerationRecord | None = None) -> None:
        asked, requests = message.request, self._requests
        expected = message.adapter_id if message.HasField("adapter_id") else None
        if asked.n > 1:
            raise InvalidField("request.n", "must be at most 1: each sample is a separate request here")
        if asked.stop:
            raise InvalidField("request.stop", "must be empty: output has no text here")
        is_follower = message.is_follower
        with contextlib.nullcontext() if is_follower else requests.arriving(name, asked.cache.tenant_id):
            [request] = await requests.validator.validate(asked)
        if request.adapter_id != expected:
            raise InvalidField("adapter_id", "differs from the id of the adapter that request.model names")
        output = requests.validator.output_of(request, message.output_token_ids)
        request = replace(
            request,
            expected_cached_tokens=message.expected_cached_tokens,
            part_of=message.caller_request_id,
            header_id=message.header_request_id,
            # Empty for a router, which compares requests with earlier responses itself. Front ends send an id.
            response_id=asked.cache.parts.request_id,
        )
        stream = Stream([request], None, self._ready)
        with requests.submit(stream, output, is_follower=is_follower):
            if record is not None:
                record.stream = stream
            running = self._running[name] = _Running(stream.generations[0])
            await running.done.wait()

    def _fail(self, name: str, error: ServiceError, *, is_refused: bool = False) -> None:
        status = to_status(error).SerializeToString()
        self._failures.append(pb.RequestFailure(request_id=name, status=status, is_refused=is_refused))
        self._ready.set()

    async def _write(self) -> None:
        while not self._is_over:
            message = pb.StreamRequestsResponse()
            for name, running in list(self._running.items()):
                # If the last write did not pause, the task that removes a finished request may not have run yet.
                if not running.done.is_set():
                    self._take(name, running, message)
            message.failures.extend(self._failures)
            self._failures = []
            self._add_loads(message)
            if message.ByteSize():
                try:
                    await self._context.write(message)
                except Exception as error:  # Each kind of peer raises different errors.
                    log.debug("a router left in the middle of a message", cause=str(error))
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOADS_SECONDS):
                    await self._ready.wait()
            self._ready.clear()

    def _take(self, name: str, running: _Running, message: pb.StreamRequestsResponse) -> None:
        """Adds the new output of a request."""
        generation = running.generation
        try:
            chunk = generation.take()
        except ServiceError as error:
            self._fail(name, error)
            running.done.set()
            return
        if chunk is None:
            return
        if chunk.finish_reason or not running.introduced:
            running.introduced = True
            chunk.usage.CopyFrom(generation.usage())
        message.outputs.append(chunk)
        if chunk.finish_reason:
            running.done.set()

    def _add_loads(self, message: pb.StreamRequestsResponse) -> None:
        """Adds the load if it has changed, and from time to time even if it has not."""
        now = time.monotonic()
        if now < self._loads_at + LOADS_SECONDS:
            return
        requests = self._requests
        loads = requests.loads()
        state = requests.obstacle, requests.has_obstacle(EXECUTOR_SILENT), requests.has_obstacle(CACHE_MANAGER_SILENT)
        adapters = [adapter for adapter in requests.adapters.all if not requests.adapters.is_leaving(adapter)]
        executor, cachemgr = requests.silences
        said = loads, state, adapters, int(executor / SILENCE_STEP), int(cachemgr / SILENCE_STEP)
        if said == self._said and now < self._loads_at + HEARTBEAT_SECONDS:
            return
        self._said, self._loads_at = said, now
        message.loads.CopyFrom(loads)
        message.adapters.extend(adapter.message() for adapter in adapters)
        message.obstacle, message.executor_silent, message.cachemgr_silent = state
        for duration, seconds in ((message.executor_silence, executor), (message.cachemgr_silence, cachemgr)):
            if seconds:
                duration.FromNanoseconds(int(seconds * 1e9))
