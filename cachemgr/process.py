"""The parts of a cache manager process, put together: manager, store, servers, housekeeping."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import uvloop
from prometheus_client import REGISTRY

from cachemgr.manager import CacheManager
from cachemgr.oplog.writer import OperationLog, OperationLogError
from cachemgr.persistence.key_index import KeyIndex
from cachemgr.persistence.pending_changes import PendingChanges
from cachemgr.persistence.redis_index import UP, IndexStore
from cachemgr.rpc import tenancy
from cachemgr.rpc.admin_service import CacheAdminService
from cachemgr.rpc.data_service import CacheManagerService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import CacheEventService
from cachemgr.rpc.mutations import EXPIRE_SECONDS, ManagerClock, Mutations, ServiceContext
from cachemgr.rpc.vllm_event_publisher import ZmqEvents, ZmqSettings
from cachemgr.settings import CachemgrSettings
from cachemgr.slices import SLICE_SECONDS
from cachemgr.telemetry.ghost_cache import ghosts_of
from cachemgr.telemetry.prometheus import CacheCollector, Stalls
from cachemgr.types import ManagerConfig
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import logs, tracing
from protos.rpc.addresses import AddressError
from protos.rpc.redis_client import open_redis
from protos.rpc.server import Server, StopSignals
from protos.rpc.settings import SettingsError, load, variable
from protos.rpc.startup import collect_rarely

DATA_SERVICE = "kvcache.v1.CacheManagerService"
ADMIN_SERVICE = "kvcache.v1.CacheAdminService"
EVENT_SERVICE = "kvcache.v1.CacheEventService"

# Names of health checks on the admin address. All services continue if Redis or the operation log fails.
REDIS_HEALTH = "redis"
OPERATION_LOG_HEALTH = "operation_log"
# Seconds between two looks for stalls: a stall may be longer than measured by at most this time.
_BEAT_SECONDS = 0.02
# The limit on lines of a state file: this many are written in about a second.
_MAX_STATE_LINES = 100_000

log = structlog.get_logger()


class CacheManagerProcess:
    """A cache manager with its services. Created inside the event loop that runs it.

    Without a Redis in the settings, a restart loses everything.
    """

    def __init__(self, settings: CachemgrSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        config = ManagerConfig(
            lease_seconds=settings.lease_seconds,
            capacity_ahead_tokens=settings.capacity_ahead_tokens,
            free_watermark=settings.free_watermark,
            partial_reuse=settings.partial_reuse,
            copy_on_partial_reuse=settings.copy_on_partial_reuse,
            offload_min_priority=settings.offload_min_priority,
            write_through=settings.write_through,
            max_retention_priority=settings.max_retention_priority,
            max_retention_seconds=settings.max_retention_seconds,
            pin_budget=settings.pin_budget,
            ghost_sample=settings.ghost_sample,
        )
        managed = ManagerClock(clock)
        queue = PendingChanges(settings.redis_max_pending) if settings.redis_url else None
        # The epoch is the time of the start: a later start has a larger epoch.
        self._manager = CacheManager(time.time_ns(), managed, config, queue, queue, ghosts_of)
        self._log: OperationLog | None = None
        if settings.operation_log is not None:
            self._log = OperationLog.create(settings.operation_log, managed.now, self._manager.epoch, config)
        self._mutations = Mutations(self._manager, managed, self._log, self._fail)
        self._store: IndexStore | None = None
        if queue is not None:
            self._store = IndexStore(
                open_redis(settings.redis_url),
                queue,
                self._manager.queries,
                self._mutations,
                epoch=self._manager.epoch,
                shard=settings.shard,
                interval=settings.redis_flush_seconds,
            )
        self._key_index: KeyIndex | None = None
        if settings.key_index:
            self._key_index = KeyIndex(
                open_redis(settings.redis_url),
                self._manager.queries,
                epoch=self._manager.epoch,
                shard=settings.shard,
                interval=settings.redis_flush_seconds,
                max_pending=settings.redis_max_pending,
            )
        self._state_file = settings.state_dir.expanduser() / failed_state(settings.shard)
        # Set to the error of a call that may have left its work half done.
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._feed = EventFeed(self._manager.queries)
        self._zmq: ZmqEvents | None = None
        if settings.zmq_events:
            zmq = ZmqSettings(settings.zmq_events, settings.zmq_replays, settings.zmq_topic, settings.zmq_token_ids)
            self._zmq = ZmqEvents(self._manager.queries, self._feed, zmq, first_number=self._manager.epoch)
        self._collector = CacheCollector(self._manager.queries)
        self._server = self._build_server(settings)
        self._background: list[asyncio.Future[None]] = []

    def _build_server(self, settings: CachemgrSettings) -> Server:
        server = Server(
            "cachemgr",
            metrics_address=settings.metrics_address,
            drain_seconds=settings.drain_seconds,
            security=settings.security,
        )
        context = ServiceContext(self._mutations, self._feed, self._store)
        kept = {REDIS_HEALTH: self._store, OPERATION_LOG_HEALTH: self._log}
        server.listen(
            settings.cachemgr_address,
            {
                DATA_SERVICE: lambda to: pb_grpc.add_CacheManagerServiceServicer_to_server(
                    CacheManagerService(context), to
                )
            },
            setting=variable(CachemgrSettings, "cachemgr_address"),
            check=tenancy.check_ids,
        )
        server.listen(
            settings.cachemgr_admin_address,
            {
                ADMIN_SERVICE: lambda to: pb_grpc.add_CacheAdminServiceServicer_to_server(
                    CacheAdminService(context), to
                ),
                EVENT_SERVICE: lambda to: pb_grpc.add_CacheEventServiceServicer_to_server(
                    CacheEventService(context), to
                ),
            },
            setting=variable(CachemgrSettings, "cachemgr_admin_address"),
            parts=[part for part, keeper in kept.items() if keeper is not None],
            check=tenancy.check,
        )
        return server

    async def start(self) -> None:
        """Reads operators' settings, unless Redis is slow; then listens and reports healthy. Raises AddressError."""
        if self._store is not None:
            await self._store.start()
        else:
            # Redis is neither up nor down.
            UP.set(math.nan)
            log.warning(
                "KVKEEP_REDIS_URL is empty: a restart of the cache manager loses the cache and operators' settings"
            )
        await self._server.start()
        REGISTRY.register(self._collector)
        work = [self._keep_house(), self._watch_for_stalls()]
        work += [part.run() for part in (self._store, self._key_index, self._zmq) if part is not None]
        self._background = [self._failure, *(asyncio.create_task(part) for part in work)]
        self._server.set_serving(True)
        if self._store is not None:
            self._server.set_serving(self._store.up, REDIS_HEALTH)

    async def run_until_stopped(self, signals: StopSignals) -> None:
        """Serves until a signal; a background task that fails ends the process with its error."""
        serving: asyncio.Future[Any] = asyncio.create_task(self._server.run_until_stopped(signals, self._drain))
        done, _ = await asyncio.wait({serving, *self._background}, return_when=asyncio.FIRST_COMPLETED)
        if serving not in done:
            serving.cancel()
            if self._mutations.failed:
                # Half-changed state must not be written to Redis: the next process restores what Redis has.
                self._stop_background()
            await self._drain()
            await self._server.stop()
        await self._finish()
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Drains and ends everything, and writes the last changes to Redis."""
        await self._drain()
        await self._server.stop()
        await self._finish()

    async def _drain(self) -> None:
        self._feed.close()

    async def _finish(self) -> None:
        REGISTRY.unregister(self._collector)
        self._stop_background()
        await asyncio.wait(self._background)
        if self._store is not None:
            await self._store.close(write=not self._mutations.failed)
        if self._key_index is not None:
            await self._key_index.close(write=not self._mutations.failed)
        if self._log is not None:
            self._log.close()

    def _stop_background(self) -> None:
        for task in self._background:
            task.cancel()

    def _fail(self, method: str, error: Exception) -> None:
        """Writes the manager's state to a file and ends the process, since a call may have left its work half done."""
        written = _write_state(self._state_file, self._manager)
        log.critical(
            "a call failed unexpectedly; the cache manager ends, since its state may be inconsistent",
            call=method,
            state=str(self._state_file) if written else "",
            exc_info=error,
        )
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _watch_for_stalls(self) -> None:
        stalls = Stalls(time.monotonic())
        while True:
            due = time.monotonic() + _BEAT_SECONDS
            await asyncio.sleep(_BEAT_SECONDS)
            now = time.monotonic()
            stalls.note(now, now - due)

    async def _keep_house(self) -> None:
        redis_up: bool | None = None
        while True:
            self._mutations.expire()
            if self._store is not None and self._store.up is not redis_up:
                redis_up = self._store.up
                self._server.set_serving(redis_up, REDIS_HEALTH)
            if self._log is not None and not self._log.is_whole:
                self._server.set_serving(False, OPERATION_LOG_HEALTH)
            self._feed.notify()
            due = time.monotonic() + EXPIRE_SECONDS
            while self._manager.is_behind and time.monotonic() < due:
                await asyncio.sleep(SLICE_SECONDS)
                self._mutations.expire()
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def failed_state(shard: str = "") -> str:
    """The name of the file in the state folder for a manager's state after a call that failed unexpectedly."""
    return f"cachemgr-{shard and f'{shard}-'}failed.jsonl"


def _write_state(path: Path, manager: CacheManager) -> bool:
    """Writes the first lines of a manager's state, without token ids, to a file that only its owner can read.

    Returns whether all these lines were written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            # Line by line, since a half-changed state may not be readable to its end.
            for line in itertools.islice(manager.queries.state(), _MAX_STATE_LINES):
                file.write(line + "\n")
    except Exception as error:
        log.warning("the state of the cache manager is not completely written", error=type(error).__name__)
        return False
    return True


def run() -> None:
    """Runs until SIGTERM or Ctrl-C. Raises SettingsError, and SystemExit with the reason of a failed start."""
    settings = load(CachemgrSettings, os.environ)
    if settings.key_index and not settings.redis_url:
        raise SettingsError(f"{variable(CachemgrSettings, 'key_index')} needs KVKEEP_REDIS_URL")
    logs.configure("cachemgr", settings.log_level)
    tracing.start("cachemgr", os.environ)
    try:
        uvloop.run(_run(settings))
    except (AddressError, OperationLogError) as error:
        sys.exit(f"cachemgr: {error}")
    finally:
        tracing.stop()


async def _run(settings: CachemgrSettings) -> None:
    process = CacheManagerProcess(settings)
    signals = StopSignals()
    await process.start()
    collect_rarely()
    await process.run_until_stopped(signals)
