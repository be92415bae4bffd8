"""Channels between processes."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import channel as channels
from protos.rpc.channel import open_channel, open_sync_channel
from protos.rpc.server import Server
from tests.support.patience import patience
from tests.unit.rpc.conftest import ADMIN, Admin

# By default, the last of this number of attempts to connect comes after half an hour.
ATTEMPTS = 30


async def test_a_server_that_starts_again_is_found_soon_however_long_it_was_away(tmp_path: Path) -> None:
    address, attempts, tried = f"unix:{tmp_path}/s", 0, asyncio.Event()

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        writer.close()
        attempts += 1
        if attempts == ATTEMPTS:
            tried.set()

    async with open_channel(address) as channel:
        stub: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)
        called = asyncio.ensure_future(stub.PurgeBlocks(pb.PurgeBlocksRequest(), wait_for_ready=True))
        async with asyncio.timeout(patience(60)):
            # The pause between two attempts does not grow.
            async with await asyncio.start_unix_server(refuse, f"{tmp_path}/s"):
                await tried.wait()
            server = Server("test", drain_seconds=0)
            server.listen(address, {ADMIN: lambda s: pb_grpc.add_CacheAdminServiceServicer_to_server(Admin(), s)})
            await server.start()
            await called
        await server.stop()


ECHO = """
import sys, grpc
from concurrent.futures import ThreadPoolExecutor
class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((Echo(),))
server.add_insecure_port(sys.argv[1])
server.start()
print("listening", flush=True)
server.wait_for_termination()
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The address of a server that echoes everything, in a separate process, and the process."""
    address = f"unix:{tmp_path}/s"
    with subprocess.Popen([sys.executable, "-c", ECHO, address], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield address, process.pid
        process.kill()


@pytest.mark.parametrize("messages", [1, 200], ids=["idle", "busy"])
def test_a_stream_to_a_process_that_is_stopped_is_given_up(
    messages: int, echo: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open and takes bytes; only an unanswered ping shows it."""
    monkeypatch.setattr(channels, "KEEPALIVE_SECONDS", 1)
    # A busy process answers a ping sooner.
    monkeypatch.setattr(channels, "KEEPALIVE_TIMEOUT_SECONDS", 5)
    address, pid = echo
    said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with open_sync_channel(address) as channel:
        # The call's own deadline is there to end the test only.
        answers = channel.stream_stream("/test/Echo")(iter(said.get, b"end"), timeout=patience(30))
        for _ in range(messages):
            said.put(b"x" * 1000)
            next(answers)
        os.kill(pid, signal.SIGSTOP)
        # A thread of it may still run when the signal is sent.
        os.waitpid(pid, os.WUNTRACED)
        said.put(b"x")
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        said.put(b"end")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
