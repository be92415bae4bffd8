"""Channels between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import channel as channels
from protos.rpc.channel import open_channel, open_sync_channel
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


SERVE = """
import asyncio, sys
from protos.rpc.server import Server
async def serve():
    server = Server("test")
    server.listen(sys.argv[1], {})
    await server.start()
    print("listening", flush=True)
    await server.run_until_stopped()
asyncio.run(serve())
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server in a process of its own, and the process."""
    address = f"unix:{tmp_path}/s"
    with subprocess.Popen([sys.executable, "-c", SERVE, address], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield address, process
        process.kill()


def test_a_stream_to_a_process_that_is_stopped_is_given_up(
    stopped: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open and takes bytes; only a ping that nobody answers tells."""
    monkeypatch.setattr(channels, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(channels, "KEEPALIVE_TIMEOUT_SECONDS", 1)
    address, process = stopped
    with open_sync_channel(address) as channel:
        # The call's own deadline is there to end the test only.
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        next(watch)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
