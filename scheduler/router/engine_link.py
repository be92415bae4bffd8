"""The stream to one engine, which is reopened whenever it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeAlias

import grpc
import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.security import Security
from scheduler.request import Adapter
from scheduler.router.expected_seconds import Rates
from scheduler.router.view import Owner

if TYPE_CHECKING:
    from scheduler.router.reports import EngineReports

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.3
# An engine reports its load at least twice a second. An engine that is silent for this long is lost.
SILENCE_SECONDS = 5.0
# An engine that is silent for QUIET_SECONDS, or whose executor or cache manager is silent for HESITATION_SECONDS, gets
# requests only if no other engine does. Its requests without a token move to other engines; if the executor is silent,
# all its requests do.
QUIET_SECONDS, HESITATION_SECONDS = 1.0, 1.0
# Requests have capacity for about this long without the cache manager, which restarts in less.
NO_BLOCKS_SECONDS = 2.5
# Seconds between two counts of silence, and the most that one count adds: while this process itself was stalled, its
# engines were not silent.
TURN_SECONDS, LONGEST_TURN_SECONDS = 0.25, 0.3
# How long an engine gets no requests after it refused a request that another engine may take. Engines of a shard whose
# cache manager is silent are avoided for as long.
AVOID_SECONDS = 1.0
# Weight of a new duration in the mean duration of requests.
_WEIGHT = 0.1

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.StreamRequestsRequest, pb.StreamRequestsResponse]"

log = structlog.get_logger()


async def describe(address: str, security: Security) -> pb.GetEngineResponse:
    """Returns what an engine says of itself. Raises AioRpcError, AddressError."""
    async with open_channel(address, security) as channel:
        stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
        return await stub.GetEngine(pb.GetEngineRequest(), timeout=CALL_SECONDS)


class EngineLink:
    """An engine at an address. Figures follow from the last message of the engine, and from the requests sent since."""

    def __init__(self, address: str, security: Security, first: pb.GetEngineResponse) -> None:
        """first: the engine whose model all engines serve."""
        self.address = address
        self._model_digest = first.executor.model_digest
        self.engine = pb.GetEngineResponse()
        self.is_open = False
        # Whether its address is no longer listed.
        self.is_leaving = False
        self.has_other_model = False
        # What prevents requests, in the engine's words, or why the link is not open; empty if nothing prevents them.
        self.obstacle = "it has not answered yet"
        # Whether its executor, or its cache manager, does not answer.
        self.executor_silent = self.cachemgr_silent = False
        # How long they have not answered, in seconds.
        self._executor_silence = self._cachemgr_silence = 0.0
        self.loads = pb.GetLoadsResponse()
        # Adapters that requests to it may name, by name.
        self.adapters: dict[str, Adapter] = {}
        self.rates = Rates()
        # Since the link was made: samples sent, their prompt tokens, and how many of these were expected to be cached.
        self.routed_requests = self.routed_tokens = self.expected_tokens = 0
        # When the engine last got a prompt without any cached token, in seconds of the monotonic clock.
        self.cold_at = 0.0
        self._security = security
        self._loads_at = self._measured_at = 0.0
        # Since it last reported its load: samples given to it, less those that have ended; and uncached prompt tokens
        # given to it, less those computed.
        self._given, self._given_tokens = 0, 0
        # Prompt tokens that its last reported load counts as queued but that have been computed since.
        self._computed_tokens = 0
        self._avoided_until = 0.0
        # For the open stream; None ends the stream.
        self._commands: asyncio.Queue[pb.StreamRequestsRequest | None] = asyncio.Queue()
        # When it last said anything, and the seconds of silence that count since then.
        self.heard_at = 0.0
        self._silence = 0.0

    @property
    def executor_id(self) -> str:
        return self.engine.executor.executor_id

    @property
    def owner(self) -> Owner:
        """The engine's executor, as the view of the caches names it."""
        return Owner(self.engine.cachemgr_admin_address, self.executor_id)

    def obstacle_at(self, now: float) -> str:
        """Returns why the engine would get no request, in words for operators; empty if it would get requests.

        now: in seconds of the monotonic clock, as everywhere here.
        """
        if not self.obstacle and self.is_leaving:
            return "its address is no longer listed: it gets no new requests"
        if not self.obstacle and now < self._avoided_until:
            return f"it is avoided for {AVOID_SECONDS:g} s: it refused a request, or its cache manager is silent"
        return self.obstacle

    @property
    def is_quiet(self) -> bool:
        """Whether the engine has said nothing for a while."""
        return self._silence >= QUIET_SECONDS

    @property
    def makes_no_progress(self) -> bool:
        """Whether the engine's executor does not answer."""
        return self.executor_silent or self._executor_silence >= HESITATION_SECONDS

    @property
    def gets_no_blocks(self) -> bool:
        """Whether the engine's cache manager has been silent for so long that requests run out of blocks."""
        return self.cachemgr_silent or self._cachemgr_silence >= NO_BLOCKS_SECONDS

    @property
    def hesitates(self) -> bool:
        """Whether a new request to the engine would wait for something that does not answer."""
        waits = self.cachemgr_silent or self._cachemgr_silence >= HESITATION_SECONDS
        return waits or self.makes_no_progress or self.is_quiet

    def serves(self, adapter: Adapter | None) -> bool:
        """Returns whether the engine has the adapter with the same content; every engine serves the model alone."""
        if adapter is None:
            return True
        found = self.adapters.get(adapter.name)
        return found is not None and found.adapter_id == adapter.adapter_id

    @property
    def has_room(self) -> bool:
        """Whether the engine's waiting queue takes one more sample."""
        return self.loads.waiting_requests + self._given < self.loads.max_waiting_requests

    @property
    def load(self) -> int:
        """Samples that run or wait: those of the last reported load, plus those given since, less those ended since."""
        return max(0, self.loads.running_requests + self.loads.waiting_requests + self._given)

    def age_of_rates(self, now: float) -> float:
        """Returns the seconds since the engine's measured time of a prompt token last changed."""
        return now - self._measured_at

    def queued_tokens(self, now: float) -> float:
        """Returns the prompt tokens to compute: of the last load, less those computed since, plus those given since."""
        token = self.rates.prompt_token
        computed = max((now - self._loads_at) / token if token else 0.0, self._computed_tokens)
        return max(0.0, self.loads.queued_prompt_tokens - computed) + self._given_tokens

    def start(self, message: pb.StartRequest, prompt_tokens: int, expected_tokens: int) -> None:
        """Sends a request. expected_tokens: prompt tokens that are expected to be cached."""
        self.routed_requests += 1
        self.routed_tokens += prompt_tokens
        self.expected_tokens += expected_tokens
        self._given += 1
        self._given_tokens += prompt_tokens - expected_tokens
        self._commands.put_nowait(pb.StreamRequestsRequest(start=message))

    def note_computed(self, begun: float, tokens: int) -> None:
        """Notes that the prompt of a request, begun at that time, is no longer queued at the engine."""
        if begun >= self._loads_at:
            self._given_tokens -= tokens
        else:
            self._computed_tokens += tokens

    def note_end(self) -> None:
        """Notes that a request has ended, which the engine's last reported load may not reflect."""
        self._given -= 1

    def cancel(self, request_id: str) -> None:
        """Ends a request, which may have ended already."""
        if self.is_open:
            self._commands.put_nowait(pb.StreamRequestsRequest(cancel=pb.CancelRequest(request_id=request_id)))

    def avoid(self, now: float) -> None:
        """Keeps requests from the engine for AVOID_SECONDS."""
        self._avoided_until = now + AVOID_SECONDS

    def ended(self, seconds: float) -> None:
        """Takes the duration of a request at the engine."""
        mean = self.rates.request
        self.rates = self.rates._replace(request=seconds if mean is None else mean + _WEIGHT * (seconds - mean))

    async def run(self, reports: EngineReports) -> None:
        """Keeps the stream open until cancelled."""
        said = ""
        async with open_channel(self.address, self._security) as channel:
            stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
            while True:
                was_silent = False
                try:
                    self.engine = await stub.GetEngine(pb.GetEngineRequest(), timeout=CALL_SECONDS)
                    self.has_other_model = self.engine.executor.model_digest != self._model_digest
                    if not self.has_other_model:
                        await self._converse(stub, reports)
                        cause = "it ended the stream"
                    else:
                        model = self.engine.model.model
                        cause = f"it serves another model, or another dtype, tokenizer or chat template: {model}"
                except grpc.aio.AioRpcError as error:
                    cause = str(from_rpc_error(error))
                except TimeoutError:
                    was_silent = True
                    cause = f"it has said nothing for {SILENCE_SECONDS:g} seconds"
                except Exception as error:
                    # An engine that the router does not understand must not end the requests of other engines.
                    log.exception("an engine has sent what the router cannot take in", address=self.address)
                    cause = f"the router cannot take in what it sends: {type(error).__name__}"
                was_open, self.is_open, self.obstacle = self.is_open, False, cause
                if was_open:
                    reports.lost(self, was_silent=was_silent)
                if was_open or cause != said:
                    said = cause
                    say = log.warning if self.has_other_model else log.info
                    say("waiting for an engine", address=self.address, cause=cause)
                await asyncio.sleep(RETRY_SECONDS)

    async def _converse(self, stub: rpc.EngineServiceAsyncStub, reports: EngineReports) -> None:
        commands: asyncio.Queue[pb.StreamRequestsRequest | None] = asyncio.Queue()
        self._commands = commands
        self._silence = self._executor_silence = self._cachemgr_silence = 0.0
        call = stub.StreamRequests(_sent(commands))
        try:
            async with asyncio.timeout(None) as bound:
                watching = asyncio.create_task(self._watch(bound))
                try:
                    await self._read(call, reports)
                finally:
                    watching.cancel()
        finally:
            call.cancel()
            # For a call that has ended by itself, gRPC would wait for commands forever.
            commands.put_nowait(None)

    async def _read(self, call: Call, reports: EngineReports) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, pb.StreamRequestsResponse):
                return
            self.heard_at, self._silence = time.monotonic(), 0.0
            reports.received(self, response)

    async def _watch(self, bound: asyncio.Timeout) -> None:
        """Ends the stream once the engine has been silent for too long."""
        while self._silence < SILENCE_SECONDS:
            begun = time.monotonic()
            await asyncio.sleep(TURN_SECONDS)
            self._silence += min(time.monotonic() - begun, LONGEST_TURN_SECONDS)
        bound.reschedule(asyncio.get_running_loop().time())

    def take_loads(self, response: pb.StreamRequestsResponse) -> None:
        """Takes the engine's load, after all ends and failures that it reported; the first load opens the link."""
        if not self.is_open:
            self.is_open = True
            log.info("engine found", address=self.address, executor=self.executor_id)
        self.loads, self.obstacle = response.loads, response.obstacle
        self.adapters = {adapter.name: Adapter.of(adapter) for adapter in response.adapters}
        self.executor_silent, self.cachemgr_silent = response.executor_silent, response.cachemgr_silent
        self._executor_silence = response.executor_silence.ToTimedelta().total_seconds()
        self._cachemgr_silence = response.cachemgr_silence.ToTimedelta().total_seconds()

        def seconds(field: str) -> float | None:
            return getattr(self.loads, field).ToNanoseconds() / 1e9 if self.loads.HasField(field) else None

        # Computed here rather than for every decision.
        prompt_token = seconds("prompt_token_time")
        if prompt_token != self.rates.prompt_token:
            self._measured_at = time.monotonic()
        self.rates = self.rates._replace(
            prompt_token=prompt_token,
            host_block=seconds("host_block_time"),
            disk_block=seconds("disk_block_time"),
            step=seconds("step_time"),
            sequence=seconds("sequence_time"),
        )
        self._loads_at = time.monotonic()
        self._given = self._given_tokens = self._computed_tokens = 0


async def _sent(commands: asyncio.Queue[pb.StreamRequestsRequest | None]) -> AsyncIterator[pb.StreamRequestsRequest]:
    while (command := await commands.get()) is not None:
        yield command
