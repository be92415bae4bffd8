"""The scheduler with an allocator in its own process, `python -m bench.in_process`, for comparison with kvkeep.

The same classes decide about the same blocks, but there is no second process: no call leaves the process, and
nothing is copied to Redis. Only executors use gRPC, to register.
"""

import asyncio
import os
import sys
import time
from typing import Any
from unittest import mock

import uvloop
from prometheus_client import Counter

from cachemgr.manager import CacheManager
from cachemgr.process import DATA_SERVICE
from cachemgr.rpc.data_service import CacheManagerService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.types import ManagerConfig
from protos.kvcache.v1 import kvcache_pb2_grpc
from protos.rpc import logs
from protos.rpc.server import Server
from protos.rpc.settings import load
from scheduler import process as scheduler
from scheduler.settings import SchedulerSettings

SYNC_BYTES = Counter("kvkeep_bench_sync_bytes", "Bytes that syncs would have on the wire.", ["direction"])
# No lease is renewed here.
LEASE_SECONDS = 36_000.0


class LocalStub:
    """The calls of the scheduler's cache client, answered in the same process."""

    def __init__(self, service: CacheManagerService) -> None:
        self._service = service

    def __getattr__(self, method: str) -> Any:
        async def call(request: Any, **_: object) -> Any:
            # Other tasks on the loop get their turn, as they do while a real call is in flight.
            await asyncio.sleep(0)
            answer = await getattr(self._service, method)(request, None)
            if method == "SyncSequences":
                SYNC_BYTES.labels("request").inc(request.ByteSize())
                SYNC_BYTES.labels("answer").inc(answer.ByteSize())
            return answer

        return call


async def serve(settings: SchedulerSettings) -> int:
    """Serves until a signal; returns the exit status."""
    clock = ManagerClock(time.monotonic)
    manager = CacheManager(time.time_ns(), clock, ManagerConfig(lease_seconds=LEASE_SECONDS))
    service = CacheManagerService(ServiceContext(Mutations(manager, clock), EventFeed(manager.queries)))
    server = Server("cachemgr")
    server.listen(
        settings.cachemgr_address,
        {DATA_SERVICE: lambda to: kvcache_pb2_grpc.add_CacheManagerServiceServicer_to_server(service, to)},
    )
    await server.start()
    server.set_serving(True)
    with mock.patch.object(kvcache_pb2_grpc, "CacheManagerServiceStub", return_value=LocalStub(service)):
        status = await scheduler.serve(settings, os.environ)
    await server.stop()
    return status


if __name__ == "__main__":
    logs.configure("scheduler", "info")
    sys.exit(uvloop.run(serve(load(SchedulerSettings, os.environ))))
