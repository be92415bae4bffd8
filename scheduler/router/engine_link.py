"""The stream to one engine, opened again whenever it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

import grpc
import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.security import Security
from scheduler.router.score import Rates

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.3
# An engine says its load once a second at least; one that says nothing for so long is lost.
SILENCE_SECONDS = 5.0
# An engine that refused a request as it was not ready gets no other one for so long.
AVOID_SECONDS = 1.0
# Weight of a new duration in the mean duration of requests.
_WEIGHT = 0.1

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.StreamRequestsRequest, pb.StreamRequestsResponse]"

log = structlog.get_logger()


class LinkListener(Protocol):
    """Receives what comes from engines, on the asyncio loop."""

    def opened(self, link: EngineLink) -> None:
        """The engine takes requests."""

    def received(self, link: EngineLink, response: pb.StreamRequestsResponse) -> None:
        """It has sent news of its requests, or its load."""

    def lost(self, link: EngineLink) -> None:
        """The stream is over: the engine has dropped all requests of it."""


async def describe(address: str, security: Security) -> pb.GetEngineResponse:
    """What an engine says of itself. Raises AioRpcError."""
    async with open_channel(address, security) as channel:
        stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
        return await stub.GetEngine(pb.GetEngineRequest(), timeout=CALL_SECONDS)


class EngineLink:
    """An engine by its address. Its figures are as of its last message, and of what it was given since."""

    def __init__(self, address: str, security: Security, first: pb.GetEngineResponse) -> None:
        """first: the engine whose model all serve."""
        self.address = address
        self._model_digest = first.executor.model_digest
        self.engine = pb.GetEngineResponse()
        self.is_open = False
        # Why it gets no requests, in words; empty when it gets some.
        self.obstacle = "it has not answered yet"
        self.loads = pb.GetLoadsResponse()
        # When it was last given a prompt that no engine had cached, in seconds of the monotonic clock.
        self.cold_at = 0.0
        self._security = security
        self._loads_at = 0.0
        # Given since its last load: samples and uncached prompt tokens.
        self._given, self._given_tokens = 0, 0
        self._avoided_until = 0.0
        self._request_seconds: float | None = None
        self._commands: asyncio.Queue[pb.StreamRequestsRequest] = asyncio.Queue()
        self._heard_at = 0.0

    @property
    def executor_id(self) -> str:
        """Names the engine in the caches' events."""
        return self.engine.executor.executor_id

    def takes_requests(self, now: float) -> bool:
        """Whether a request would run there. now: in seconds of the monotonic clock, as everywhere here."""
        return self.is_open and not self.obstacle and now >= self._avoided_until

    @property
    def has_room(self) -> bool:
        """Whether its waiting queue takes one more."""
        return self.loads.waiting_requests + self._given < self.loads.max_waiting_requests

    @property
    def load(self) -> int:
        """Samples that run and wait."""
        return self.loads.running_requests + self.loads.waiting_requests + self._given

    @property
    def rates(self) -> Rates:
        def seconds(field: str) -> float | None:
            return getattr(self.loads, field).ToNanoseconds() / 1e9 if self.loads.HasField(field) else None

        return Rates(
            seconds("prompt_token_time"), seconds("host_block_time"), seconds("disk_block_time"), self._request_seconds
        )

    def queued_tokens(self, now: float) -> float:
        """Prompt tokens to compute: those of its last load, less what it has computed since, and what it was given."""
        token = self.rates.prompt_token
        computed = (now - self._loads_at) / token if token else 0.0
        return max(0.0, self.loads.queued_prompt_tokens - computed) + self._given_tokens

    def start(self, message: pb.StartRequest, uncached_tokens: int) -> None:
        """Sends a request."""
        self._given += 1
        self._given_tokens += uncached_tokens
        self._commands.put_nowait(pb.StreamRequestsRequest(start=message))

    def cancel(self, request_id: str) -> None:
        """Ends a request, which may have ended."""
        if self.is_open:
            self._commands.put_nowait(pb.StreamRequestsRequest(cancel=pb.CancelRequest(request_id=request_id)))

    def avoid(self, now: float) -> None:
        """The engine was not ready after all."""
        self._avoided_until = now + AVOID_SECONDS

    def ended(self, seconds: float) -> None:
        """A request took so long there."""
        mean = self._request_seconds
        self._request_seconds = seconds if mean is None else mean + _WEIGHT * (seconds - mean)

    async def run(self, listener: LinkListener) -> None:
        """Keeps the stream open until cancelled."""
        said = ""
        async with open_channel(self.address, self._security) as channel:
            stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
            while True:
                try:
                    self.engine = await stub.GetEngine(pb.GetEngineRequest(), timeout=CALL_SECONDS)
                    if self.engine.executor.model_digest == self._model_digest:
                        self._commands = asyncio.Queue()
                        await self._converse(stub.StreamRequests(self._sent()), listener)
                        cause = "it ended the stream"
                    else:
                        cause = f"it serves another model, {self.engine.model.model}"
                except grpc.aio.AioRpcError as error:
                    cause = str(from_rpc_error(error))
                except TimeoutError:
                    cause = f"it has said nothing for {SILENCE_SECONDS:g} seconds"
                was_open, self.is_open, self.obstacle = self.is_open, False, cause
                if was_open:
                    listener.lost(self)
                if was_open or cause != said:
                    said = cause
                    log.info("waiting for an engine", address=self.address, cause=cause)
                await asyncio.sleep(RETRY_SECONDS)

    async def _sent(self) -> AsyncIterator[pb.StreamRequestsRequest]:
        commands = self._commands
        while True:
            yield await commands.get()

    async def _converse(self, call: Call, listener: LinkListener) -> None:
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    response = await call.read()
                if not isinstance(response, pb.StreamRequestsResponse):
                    return
                if response.HasField("loads"):
                    self._take_loads(response)
                if not self.is_open:
                    self.is_open = True
                    log.info("engine found", address=self.address, executor=self.executor_id)
                    listener.opened(self)
                listener.received(self, response)
        finally:
            call.cancel()

    def _take_loads(self, response: pb.StreamRequestsResponse) -> None:
        self.loads, self.obstacle = response.loads, response.obstacle
        self._loads_at = time.monotonic()
        self._given = self._given_tokens = 0
