"""What passes a proxy arrives as it was sent, unless a trouble was asked for: then exactly that happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.channel import open_channel
from protos.rpc.server import Server
from tests.chaos.meddling import ConnectionLostError, Meddling, Trouble
from tests.chaos.proxies import GrpcProxy, SocketProxy
from tests.support.patience import patience
from tests.unit.rpc.conftest import ADMIN, Admin, add_echo

ECHO = "/test.Echo/Stream"


class Counting(Admin):
    """Counts the messages that it receives."""

    def __init__(self) -> None:
        self.heard = 0

    async def PurgeBlocks(self, request: pb.PurgeBlocksRequest, context: object) -> pb.PurgeBlocksResponse:
        self.heard += 1
        return pb.PurgeBlocksResponse(purged_blocks=self.heard)


class Between:
    """A server, a proxy in front of it and a channel to that."""

    def __init__(self, folder: Path) -> None:
        self.admin = Counting()
        self.meddling = Meddling(random.Random(1))
        self.target = f"unix:{folder}/target"
        self.proxy = GrpcProxy(f"unix:{folder}/proxy", self.target, self.meddling, (ECHO,))
        self.channel = open_channel(self.proxy.address)
        self.stub: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(self.channel)

    async def serve(self) -> Server:
        server = Server("test", drain_seconds=0)
        add = {ADMIN: lambda s: pb_grpc.add_CacheAdminServiceServicer_to_server(self.admin, s), "test.Echo": add_echo}
        server.listen(self.target, add)
        await server.start()
        return server

    async def purge(self, seconds: float | None = None) -> int:
        """seconds: a deadline that passes if no answer comes."""
        deadline = patience(5) if seconds is None else seconds
        return (await self.stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=deadline)).purged_blocks


@pytest.fixture
async def between(tmp_path: Path) -> AsyncIterator[Between]:
    found = Between(tmp_path)
    await found.proxy.start()
    server = await found.serve()
    yield found
    await found.channel.close()
    await found.proxy.stop()
    await server.stop()


async def test_a_lost_request_is_never_heard_and_a_lost_answer_once(between: Between) -> None:
    between.meddling.shares = {Trouble.LOSE_REQUEST: 1.0}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await between.purge(0.5)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert between.admin.heard == 0
    between.meddling.shares = {Trouble.LOSE_ANSWER: 1.0}
    purging = asyncio.create_task(between.purge())
    # A broken connection is tried again by the channel itself.
    async with asyncio.timeout(patience(5)):
        while not between.admin.heard == between.meddling.met[Trouble.LOSE_ANSWER] >= 1:
            await asyncio.sleep(0.01)
    purging.cancel()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await purging


async def test_a_repeated_request_is_heard_twice_and_answered_once(between: Between) -> None:
    between.meddling.shares = {Trouble.REPEAT: 1.0}
    assert await between.purge() == 2
    assert between.admin.heard == 2


async def test_only_the_asked_share_of_calls_meets_a_trouble() -> None:
    meddling = Meddling(random.Random(1))
    asked = 0

    async def ask() -> bytes:
        nonlocal asked
        asked += 1
        return b"answer"

    async def lost(carry: Callable[[], Awaitable[bytes]]) -> bool:
        try:
            await asyncio.wait_for(carry(), 0.01)  # subject: a call that is lost in silence never ends
        except (TimeoutError, ConnectionLostError):
            return True
        return False

    meddling.shares = {Trouble.LOSE_REQUEST: 0.25}
    gone = sum([await lost(lambda: meddling.carry(ask)) for _ in range(200)])
    assert 30 < gone < 70
    assert asked == 200 - gone


async def test_a_socket_proxy_carries_delays_and_breaks(tmp_path: Path) -> None:
    echoes: set[asyncio.Task[None]] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        echoes.add(task)
        while data := await reader.read(100):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(echo, tmp_path / "target")
    proxy = SocketProxy(tmp_path / "proxy", tmp_path / "target")
    await proxy.start()
    reader, writer = await asyncio.open_unix_connection(proxy.address)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"

    proxy.delay = 0.1
    clock = asyncio.get_running_loop().time
    begin = clock()
    writer.write(b"two")
    assert await reader.readexactly(3) == b"two"
    assert clock() - begin > 0.2

    proxy.cut()
    assert await reader.read(1) == b""
    writer.close()
    reader, writer = await asyncio.open_unix_connection(proxy.address)
    assert await reader.read(1) == b""
    writer.close()

    proxy.delay = 0.0
    proxy.mend()
    reader, writer = await asyncio.open_unix_connection(proxy.address)
    writer.write(b"six")
    assert await reader.readexactly(3) == b"six"
    writer.close()
    await proxy.stop()
    server.close()
    # What still runs when the loop ends would warn in another test.
    await asyncio.wait(echoes, timeout=patience(5))


async def test_a_held_connection_stands_and_brings_everything_once_it_is_mended(tmp_path: Path) -> None:
    serving: set[asyncio.Task[None]] = set()

    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()

    server = await asyncio.start_unix_server(upper, tmp_path / "target")
    proxy = SocketProxy(tmp_path / "proxy", tmp_path / "target")
    await proxy.start()
    old, to_old = await asyncio.open_unix_connection(proxy.address)
    to_old.write(b"one")
    assert await old.readexactly(3) == b"ONE"
    proxy.hold()
    new, to_new = await asyncio.open_unix_connection(proxy.address)
    for writer in (to_old, to_new):
        writer.write(b"two")
    reading = [asyncio.create_task(reader.readexactly(3)) for reader in (old, new)]
    _, waiting = await asyncio.wait(reading, timeout=0.2)  # subject: nothing comes meanwhile
    assert len(waiting) == 2
    proxy.mend()
    assert await asyncio.gather(*reading) == [b"TWO", b"TWO"]
    for writer in (to_old, to_new):
        writer.close()
    await proxy.stop()
    server.close()
    await asyncio.wait(serving, timeout=patience(5))
    await asyncio.gather(*(writer.wait_closed() for writer in (to_old, to_new)))
