"""Proxies that processes talk through: gRPC of any method as raw bytes, and byte streams for Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from protos.rpc.addresses import split_host_port
from tests.chaos.meddling import ConnectionLostError, Meddling

MESSAGE_BYTES = 64 << 20
CHUNK = 1 << 16
# Methods that stream in either direction; every other method has one request and one answer.
STREAMS = ("/execution.v1.ExecutorService/StreamSteps", "/grpc.health.v1.Health/Watch")
_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # The clients decide whether and when they repeat a call.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 100),
]


class GrpcProxy(grpc.GenericRpcHandler):
    """Serves the calls of `target` at `address`, with the troubles of `meddling`. Use `start` and `stop`.

    streams: methods that stream, by their full names.
    """

    def __init__(self, address: str, target: str, meddling: Meddling, streams: Collection[str] = STREAMS) -> None:
        self.address = address
        self._methods = streams
        self._target = target
        self._meddling = meddling
        self._streams: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Listens. Needs no server at the target yet."""
        self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Ends all running calls."""
        await self._server.stop(None)
        await self._channel.close()

    def break_streams(self) -> int:
        """Breaks the connection under every stream that is open; returns how many there were."""
        broken = [stream for stream in self._streams if not stream.done()]
        for stream in broken:
            stream.set_result(None)
        return len(broken)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler for any method."""
        method = handler_call_details.method
        if method in self._methods:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, method))  # type: ignore[arg-type]
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, method))  # type: ignore[arg-type]

    async def _unary(self, method: str, request: bytes, context: Any) -> bytes | None:
        # Without serializers the messages are bytes.
        call: Any = self._channel.unary_unary(method)

        async def ask() -> bytes:
            answer: bytes = await call(request, timeout=context.time_remaining(), metadata=_metadata(context))
            return answer

        try:
            return await self._meddling.carry(ask)
        except (grpc.aio.AioRpcError, ConnectionLostError) as error:
            await _abort(context, error)
        return None

    async def _stream(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        method_call: Any = self._channel.stream_stream(method)
        call = method_call(timeout=context.time_remaining(), metadata=_metadata(context))
        broken = asyncio.get_running_loop().create_future()
        self._streams.add(broken)
        sending = asyncio.create_task(self._send(requests, call))
        try:
            while (answer := await _unless(broken, call.read())) is not grpc.aio.EOF:
                await self._meddling.delay_in_stream()
                yield answer
            if await call.code() is not grpc.StatusCode.OK:
                await context.abort(await call.code(), await call.details(), await call.trailing_metadata())
        except (grpc.aio.AioRpcError, ConnectionLostError) as error:
            await _abort(context, error)
        finally:
            self._streams.discard(broken)
            sending.cancel()
            call.cancel()

    async def _send(self, requests: AsyncIterator[bytes], call: Any) -> None:
        # Any end of the call is noticed where its answers are read.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            async for request in requests:
                await self._meddling.delay_in_stream()
                await call.write(request)
            await call.done_writing()


async def _unless(broken: asyncio.Future[None], reading: Any) -> Any:
    """The next message. Raises ConnectionLostError if the stream breaks before."""
    task = asyncio.ensure_future(reading)
    try:
        await asyncio.wait({task, broken}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionLostError
        return task.result()
    finally:
        task.cancel()


def _metadata(context: Any) -> list[tuple[str, str | bytes]]:
    """The caller's metadata without gRPC's own entries."""
    own = context.invocation_metadata() or ()
    return [(key, value) for key, value in own if not key.startswith(("grpc-", ":")) and key != "user-agent"]


async def _abort(context: Any, error: Exception) -> None:
    if isinstance(error, grpc.aio.AioRpcError):
        await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")


class SocketProxy:
    """Carries bytes between sockets at `address` and at `target`: paths of unix sockets, or host:port."""

    def __init__(self, address: Path | str, target: Path | str) -> None:
        self.address = address
        self._target = target
        # The delay of every piece in seconds.
        self.delay = 0.0
        self._cut = False
        self._carrying = asyncio.Event()
        self._carrying.set()
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens. Needs nobody at the target yet."""
        if isinstance(self.address, Path):
            self._server = await asyncio.start_unix_server(self._serve, self.address)
        else:
            self._server = await asyncio.start_server(self._serve, *split_host_port(self.address))

    async def stop(self) -> None:
        """Ends what runs through it."""
        self._server.close()
        self.cut()
        while self._open:
            await asyncio.wait(self._open)

    def cut(self) -> None:
        """Breaks every connection, and each new one at once, until `mend`."""
        self._cut = True
        for task in self._open:
            task.cancel()

    def hold(self) -> None:
        """Carries nothing, not even ends of connections, until `mend`: like a partitioned network."""
        self._carrying.clear()

    def mend(self) -> None:
        """Carries again."""
        self._cut = False
        self._carrying.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._carrying.wait()
            if not self._cut:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            # Both ends see that the connection is closed.
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._target, Path):
            there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        else:
            there_reader, there_writer = await asyncio.open_connection(*split_host_port(self._target))
        ways = {
            asyncio.ensure_future(self._carry(reader, there_writer)),
            asyncio.ensure_future(self._carry(there_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(ways)
            there_writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._carrying.wait()
            writer.write(data)
            await writer.drain()
        await self._carrying.wait()


async def _end(tasks: Iterable[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
