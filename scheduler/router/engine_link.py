"""The stream to one engine, opened again whenever it ends."""

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
from scheduler.router.score import Rates
from scheduler.router.view import Owner

if TYPE_CHECKING:
    from scheduler.router.reports import EngineReports

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.3
# An engine says its load twice a second at least. An engine that says nothing for this long is lost.
SILENCE_SECONDS = 5.0
# An engine that has said nothing for so long, or whose executor or cache manager has not answered, gets requests only
# where no other does. What has no token there yet goes on elsewhere, and with the executor all that it runs.
QUIET_SECONDS, HESITATION_SECONDS = 1.0, 1.0
# Its requests have capacity for about so long without the cache manager, which starts again in less.
NO_BLOCKS_SECONDS = 2.5
# How often silence is counted, and how much of it at most counts each time: when this process itself stood still, its
# engines have not been silent.
TURN_SECONDS, LONGEST_TURN_SECONDS = 0.25, 0.3
# An engine that refused a request as it was not ready gets no other one for so long.
AVOID_SECONDS = 1.0
# Weight of a new duration in the mean duration of requests.
_WEIGHT = 0.1

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.StreamRequestsRequest, pb.StreamRequestsResponse]"

log = structlog.get_logger()


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
        # Whether its address is in no list any more.
        self.is_leaving = False
        self.has_other_model = False
        # What it says is in the way of requests, or why it is not open; empty when nothing is.
        self.obstacle = "it has not answered yet"
        # Whether its executor, or its cache manager, does not answer.
        self.executor_silent = self.cachemgr_silent = False
        # For how long, in seconds.
        self._executor_silence = self._cachemgr_silence = 0.0
        self.loads = pb.GetLoadsResponse()
        # That requests there may name, by name.
        self.adapters: dict[str, Adapter] = {}
        self.rates = Rates()
        # Since the router started: samples, their prompt tokens, and the cached tokens among these that it expected.
        self.routed_requests = self.routed_tokens = self.expected_tokens = 0
        # When it was last given a prompt that no engine had cached, in seconds of the monotonic clock.
        self.cold_at = 0.0
        self._security = security
        self._loads_at = self._measured_at = 0.0
        # Given since its last load: samples and uncached prompt tokens.
        self._given, self._given_tokens = 0, 0
        # Prompt tokens that its last load still counts as queued, and that have been computed since.
        self._computed_tokens = 0
        self._avoided_until = 0.0
        # For the stream that is open; None ends it.
        self._commands: asyncio.Queue[pb.StreamRequestsRequest | None] = asyncio.Queue()
        # When it last said anything, and the seconds of silence since, as far as they count.
        self.heard_at = 0.0
        self._silence = 0.0

    @property
    def executor_id(self) -> str:
        return self.engine.executor.executor_id

    @property
    def owner(self) -> Owner:
        """Names the engine's executor in the view of the caches."""
        return Owner(self.engine.cachemgr_admin_address, self.executor_id)

    def obstacle_at(self, now: float) -> str:
        """Why it would get no request, in words for operators; empty when it would.

        now: in seconds of the monotonic clock, as everywhere here.
        """
        if not self.obstacle and self.is_leaving:
            return "its address is no longer listed: it gets no new requests"
        if not self.obstacle and now < self._avoided_until:
            return f"it has refused a request, and gets no other within {AVOID_SECONDS:g} s"
        return self.obstacle

    @property
    def is_quiet(self) -> bool:
        """Whether it has said nothing for a while."""
        return self._silence >= QUIET_SECONDS

    @property
    def makes_no_progress(self) -> bool:
        """Whether its executor does not answer."""
        return self.executor_silent or self._executor_silence >= HESITATION_SECONDS

    @property
    def gets_no_blocks(self) -> bool:
        """Whether its cache manager has not answered for so long that its requests stop."""
        return self.cachemgr_silent or self._cachemgr_silence >= NO_BLOCKS_SECONDS

    @property
    def hesitates(self) -> bool:
        """Whether a new request would wait there for something that does not answer."""
        waits = self.cachemgr_silent or self._cachemgr_silence >= HESITATION_SECONDS
        return waits or self.makes_no_progress or self.is_quiet

    def serves(self, adapter: Adapter | None) -> bool:
        """Whether requests for an adapter find the same content there; all serve the model alone."""
        if adapter is None:
            return True
        found = self.adapters.get(adapter.name)
        return found is not None and found.adapter_id == adapter.adapter_id

    @property
    def has_room(self) -> bool:
        """Whether its waiting queue takes one more."""
        return self.loads.waiting_requests + self._given < self.loads.max_waiting_requests

    @property
    def load(self) -> int:
        """Samples that run and wait: those of its last load, and what was given to it and has ended since."""
        return max(0, self.loads.running_requests + self.loads.waiting_requests + self._given)

    def age_of_rates(self, now: float) -> float:
        """Seconds since it has last measured the time of a prompt token."""
        return now - self._measured_at

    def queued_tokens(self, now: float) -> float:
        """Prompt tokens to compute: those of its last load, less what it has computed since, and what it was given."""
        token = self.rates.prompt_token
        computed = max((now - self._loads_at) / token if token else 0.0, self._computed_tokens)
        return max(0.0, self.loads.queued_prompt_tokens - computed) + self._given_tokens

    def start(self, message: pb.StartRequest, prompt_tokens: int, expected_tokens: int) -> None:
        """Sends a request. expected_tokens: of its prompt, the cached ones."""
        self.routed_requests += 1
        self.routed_tokens += prompt_tokens
        self.expected_tokens += expected_tokens
        self._given += 1
        self._given_tokens += prompt_tokens - expected_tokens
        self._commands.put_nowait(pb.StreamRequestsRequest(start=message))

    def note_computed(self, begun: float, tokens: int) -> None:
        """The prompt of a request that began then is no longer queued there."""
        if begun >= self._loads_at:
            self._given_tokens -= tokens
        else:
            self._computed_tokens += tokens

    def note_end(self) -> None:
        """A request has ended there, of which its last load may not know."""
        self._given -= 1

    def cancel(self, request_id: str) -> None:
        """Ends a request, which may have ended."""
        if self.is_open:
            self._commands.put_nowait(pb.StreamRequestsRequest(cancel=pb.CancelRequest(request_id=request_id)))

    def avoid(self, now: float) -> None:
        """The engine was not ready after all."""
        self._avoided_until = now + AVOID_SECONDS

    def ended(self, seconds: float) -> None:
        """A request took so long there."""
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
                        cause = f"it serves another model, other dtypes, tokenizer or chat template: {model}"
                except grpc.aio.AioRpcError as error:
                    cause = str(from_rpc_error(error))
                except TimeoutError:
                    was_silent = True
                    cause = f"it has said nothing for {SILENCE_SECONDS:g} seconds"
                except Exception as error:
                    # An engine that the router does not understand must not end the others' requests.
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
            # Of a call that has ended by itself gRPC would wait for commands for ever.
            commands.put_nowait(None)

    async def _read(self, call: Call, reports: EngineReports) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, pb.StreamRequestsResponse):
                return
            self.heard_at, self._silence = time.monotonic(), 0.0
            reports.received(self, response)

    async def _watch(self, bound: asyncio.Timeout) -> None:
        """Ends the conversation once the engine has been silent for too long."""
        while self._silence < SILENCE_SECONDS:
            begun = time.monotonic()
            await asyncio.sleep(TURN_SECONDS)
            self._silence += min(time.monotonic() - begun, LONGEST_TURN_SECONDS)
        bound.reschedule(asyncio.get_running_loop().time())

    def take_loads(self, response: pb.StreamRequestsResponse) -> None:
        """The load of the engine after all ends and failures that it has reported; the first load opens the link."""
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

        # Here and not for every decision.
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
