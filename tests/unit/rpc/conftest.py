"""A real server on a unix socket with a tiny servicer behind it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import InvalidField, ServiceError
from protos.rpc.server import Server

ADMIN = "kvcache.v1.CacheAdminService"
EVENTS = "kvcache.v1.CacheEventService"


class OutOfStockError(ServiceError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_STOCK"


class Admin(pb_grpc.CacheAdminServiceServicer):
    """Fails in the way that the pool's name asks for."""

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        if request.pool_id == "stock":
            raise OutOfStockError("none left", metadata={"asked": "1"}, retry_after=1.5)
        if request.pool_id == "field":
            raise InvalidField("pool_id", "must not be that")
        if request.pool_id == "bug":
            raise KeyError("secret")
        if request.pool_id == "abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "gone")
        return pb.GetPoolResponse(pool=pb.Pool(pool_id=request.pool_id))

    async def PurgeBlocks(self, request: pb.PurgeBlocksRequest, context: Any) -> pb.PurgeBlocksResponse:
        return pb.PurgeBlocksResponse()


class Events(pb_grpc.CacheEventServiceServicer):
    """Sends two events, then fails."""

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        yield pb.WatchEventsResponse(events=[pb.Event(event_number=1)])
        yield pb.WatchEventsResponse(events=[pb.Event(event_number=2)])
        raise OutOfStockError("no third event")


class Endless:
    """Streams for ever, and notes when it is asked to stop."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def stream(self, request: pb.GetPoolRequest, context: Any) -> AsyncIterator[pb.GetPoolRequest]:
        try:
            while True:
                yield request
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    def add(self, server: grpc.aio.Server) -> None:
        handler = grpc.unary_stream_rpc_method_handler(
            self.stream, pb.GetPoolRequest.FromString, pb.GetPoolRequest.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Endless", {"Stream": handler}),))


async def echo(requests: AsyncIterator[pb.GetPoolRequest], context: Any) -> AsyncIterator[pb.GetPoolRequest]:
    async for request in requests:
        yield request


def add_echo(server: grpc.aio.Server) -> None:
    handler = grpc.stream_stream_rpc_method_handler(
        echo, pb.GetPoolRequest.FromString, pb.GetPoolRequest.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Stream": handler}),))


SERVICES: dict[str, Callable[[grpc.aio.Server], None]] = {
    ADMIN: lambda server: pb_grpc.add_CacheAdminServiceServicer_to_server(Admin(), server)
}


@asynccontextmanager
async def serving(
    address: str, services: Mapping[str, Callable[[grpc.aio.Server], None]] = SERVICES, **options: Any
) -> AsyncIterator[Server]:
    """A server that runs within the block and never drains."""
    server = Server("test", drain_seconds=0, **options)
    server.listen(address, services)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@dataclass
class Served:
    """A running server and a channel to it."""

    server: Server
    address: str
    channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = open_channel(self.address)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    server = Server("test", drain_seconds=1.0)
    address = f"unix:{tmp_path}/s"
    server.listen(
        address,
        {
            ADMIN: lambda s: pb_grpc.add_CacheAdminServiceServicer_to_server(Admin(), s),
            EVENTS: lambda s: pb_grpc.add_CacheEventServiceServicer_to_server(Events(), s),
            "test.Echo": add_echo,
        },
    )
    await server.start()
    running = Served(server, address)
    yield running
    await running.channel.close()
    await server.stop()
