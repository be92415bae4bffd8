"""The parts of a cache manager process, put together: manager, store, servers, housekeeping."""

import asyncio
import time
from collections.abc import Callable

from cachemgr.admin_service import CacheAdminService
from cachemgr.api import ManagerConfig
from cachemgr.feed import EventFeed
from cachemgr.manager import CacheManager
from cachemgr.metrics import EvictionMetrics, PoolMetrics
from cachemgr.operations import ManagerClock, Operations
from cachemgr.oplog import OperationLog
from cachemgr.service import CacheEventService, CacheManagerService, Domain
from cachemgr.settings import CachemgrSettings
from cachemgr.store import IndexStore, open_redis
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.server import Server
from protos.rpc.settings import variable

DATA_SERVICE = "kvcache.v1.CacheManagerService"
ADMIN_SERVICE = "kvcache.v1.CacheAdminService"
EVENT_SERVICE = "kvcache.v1.CacheEventService"

_HOUSEKEEPING_SECONDS = 0.5


class CacheManagerProcess:
    """Create it inside the event loop that runs it. `revive_redis` is called twice a second and must not block."""

    def __init__(
        self,
        settings: CachemgrSettings,
        *,
        redis_url: str,
        revive_redis: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._revive_redis = revive_redis
        self._store = IndexStore(
            open_redis(redis_url),
            lambda executor_id: self._manager.records(executor_id),
            interval=settings.redis_flush_seconds,
            max_pending=settings.redis_max_pending,
        )
        config = ManagerConfig(
            lease_seconds=settings.lease_seconds,
            capacity_ahead_tokens=settings.capacity_ahead_tokens,
            free_watermark=settings.free_watermark,
            partial_reuse=settings.partial_reuse,
            copy_on_partial_reuse=settings.copy_on_partial_reuse,
            secondary_offload_min_priority=settings.secondary_offload_min_priority,
            max_retention_priority=settings.max_retention_priority,
            max_retention_seconds=settings.max_retention_seconds,
            pin_budget=settings.pin_budget,
        )
        managed = ManagerClock(clock)
        # Nanoseconds since 1970 are newer at every start.
        self._manager = CacheManager(time.time_ns(), managed, config, self._store)
        self._log: OperationLog | None = None
        if settings.operation_log is not None:
            self._log = OperationLog.create(settings.operation_log, managed.now, self._manager.epoch, config)
        self._operations = Operations(self._manager, managed, self._log)
        self._feed = EventFeed(lambda: self._manager.last_event)
        self._metrics = PoolMetrics()
        self._eviction_metrics = EvictionMetrics()
        self._server = self._build_server(settings)
        self._background: list[asyncio.Task[None]] = []

    def _build_server(self, settings: CachemgrSettings) -> Server:
        server = Server(
            "cachemgr",
            metrics_address=settings.metrics_address,
            drain_seconds=settings.drain_seconds,
            insecure=settings.insecure,
        )
        domain = Domain(self._operations, self._store, self._feed)
        server.listen(
            settings.cachemgr_address,
            {
                DATA_SERVICE: lambda to: pb_grpc.add_CacheManagerServiceServicer_to_server(
                    CacheManagerService(domain), to
                )
            },
            setting=variable(CachemgrSettings, "cachemgr_address"),
        )
        server.listen(
            settings.cachemgr_admin_address,
            {
                ADMIN_SERVICE: lambda to: pb_grpc.add_CacheAdminServiceServicer_to_server(
                    CacheAdminService(domain), to
                ),
                EVENT_SERVICE: lambda to: pb_grpc.add_CacheEventServiceServicer_to_server(
                    CacheEventService(domain), to
                ),
            },
            setting=variable(CachemgrSettings, "cachemgr_admin_address"),
        )
        return server

    async def start(self) -> None:
        """Listens and is healthy. Raises AddressError."""
        await self._server.start()
        self._background = [asyncio.create_task(self._store.run()), asyncio.create_task(self._keep_house())]
        self._server.set_serving(True)

    async def run_until_stopped(self) -> None:
        """Serves until a signal; a background task that fails ends the process with its error."""
        serving = asyncio.create_task(self._server.run_until_stopped(self._drain))
        done, _ = await asyncio.wait({serving, *self._background}, return_when=asyncio.FIRST_COMPLETED)
        if serving not in done:
            serving.cancel()
            await self._server.stop()
        await self._finish()
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Drains and ends everything, with the last changes written to Redis."""
        await self._drain()
        await self._server.stop()
        await self._finish()

    async def _drain(self) -> None:
        self._feed.close()

    async def _finish(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.wait(self._background)
        await self._store.close()
        if self._log is not None:
            self._log.close()

    async def _keep_house(self) -> None:
        while True:
            self._operations.expire()
            self._feed.ring()
            self._metrics.update(self._manager.pools())
            self._eviction_metrics.update(self._manager.evicted_sequences())
            if self._revive_redis is not None:
                self._revive_redis()
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
