"""Channels between processes."""

from __future__ import annotations

import time
from pathlib import Path

import grpc

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.channel import open_channel
from protos.rpc.server import Server
from tests.unit.rpc.conftest import ADMIN, Admin

# Long enough for any growing pause between attempts to have grown.
AWAY_SECONDS = 3.0
BACK_SECONDS = 0.6


async def test_a_server_that_comes_back_is_found_soon_however_long_it_was_away(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with open_channel(address) as channel:
        stub: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)

        async def answered() -> bool:
            try:
                await stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=5)
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.UNAVAILABLE
            return True

        begin = time.monotonic()
        while time.monotonic() < begin + AWAY_SECONDS:
            assert not await answered()
        server = Server("test", drain_seconds=0)
        server.listen(address, {ADMIN: lambda s: pb_grpc.add_CacheAdminServiceServicer_to_server(Admin(), s)})
        await server.start()
        begin = time.monotonic()
        while not await answered():
            pass
        assert time.monotonic() - begin < BACK_SECONDS
        await server.stop()
