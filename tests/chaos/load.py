"""Clients that send known requests without end and compare every answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.errors import from_rpc_error
from tests.chaos.requests import Known, Sample
from tests.support.patience import patience

# A request that has not ended by then hangs.
REQUEST_SECONDS = patience(60)
CANCELLED_SHARE = 0.15
# The time after which a cancelled call must have ended.
CANCEL_SECONDS = patience(10)
RETRY_SECONDS = (0.05, 1.0)
# How long a client's channel may still report a server as unavailable after it serves again.
RECONNECT_SECONDS = patience(1)
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_retries", 0),
    # A client gives up a server that does not answer on an open connection after the sum of these times.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
]

# Whether a server, by its number, was away at any time between two times.
ServerAway = Callable[[int, float, float], bool]


@dataclass(frozen=True)
class Way:
    """How a request is sent: when its client cancels it, in tokens or in seconds; None is never."""

    cancel_tokens: int | None = None
    cancel_seconds: float | None = None


@dataclass
class Tally:
    """Results of all requests so far."""

    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    # Attempts with output that differs, with any ending.
    wrong: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    running: int = 0
    # Longest time from the begin of a request's first attempt to the end of the request.
    longest: float = 0.0

    @property
    def requests(self) -> int:
        """Requests that have ended for good."""
        return self.endings["exact"] + self.endings["cancelled"] + len(self.faults)


class Load:
    """`clients` clients at a time, each with one request after the other.

    Each has a server that it asks first; if this server does not answer, it asks the next server.
    """

    def __init__(
        self, addresses: Sequence[str], known: Sequence[Known], seed: int, clients: int, away: ServerAway
    ) -> None:
        self.tally = Tally()
        self._addresses = addresses
        self._known = known
        self._seed = seed
        self._clients = clients
        self._away = away
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to send, for the first time or after `stop`."""
        self._stopping.clear()
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    async def stop(self) -> None:
        """Sends no more requests and waits for running requests, at most as long as a request may take."""
        self._stopping.set()
        done, hanging = await asyncio.wait(self._tasks, timeout=REQUEST_SECONDS + CANCEL_SECONDS)
        for task in hanging:
            task.cancel()
            self.tally.faults.append("a client still waits for its request")
        for task in done:
            task.result()

    async def _client(self, number: int) -> None:
        rng = random.Random(f"client {self._seed} {number}")
        async with contextlib.AsyncExitStack() as opened:
            stubs: list[rpc.GenerationServiceAsyncStub] = []
            for address in self._addresses:
                channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
                stubs.append(rpc.GenerationServiceStub(await opened.enter_async_context(channel)))
            count = 0
            while not self._stopping.is_set():
                count += 1
                known = rng.choice(self._known)
                await self._request(stubs, number, rng, known, f"client-{number}-{count}")

    async def _request(
        self,
        stubs: Sequence[rpc.GenerationServiceAsyncStub],
        first: int,
        rng: random.Random,
        known: Known,
        request_id: str,
    ) -> None:
        """One request to its end: repeated while servers refuse the request or die during it.

        first: number of the server to ask first; later attempts count on from this number.
        """
        request, way = decorated(known.request, rng), drawn_way(known, rng)
        begin, pause = time.monotonic(), RETRY_SECONDS[0]
        for attempt in range(1, 1_000_000):
            request.request_id = f"{request_id}.{attempt}"
            server = (first + attempt - 1) % len(stubs)
            self.tally.running += 1
            try:
                kind, fault = await self._attempt(stubs[server], server, request, known, way)
            finally:
                self.tally.running -= 1
            self.tally.endings[kind] += 1
            if fault:
                self.tally.faults.append(f"{request.request_id} ({known.name}): {fault}")
            if kind not in RETRIED:
                break
            seconds = time.monotonic() - begin
            if self._stopping.is_set() and seconds > REQUEST_SECONDS:
                self.tally.endings[STARVED] += 1
                self.tally.faults.append(f"{request_id} ({known.name}): {STARVED} after {seconds:.1f} s: {kind}")
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])
        self.tally.longest = max(self.tally.longest, time.monotonic() - begin)

    async def _attempt(
        self,
        stub: rpc.GenerationServiceAsyncStub,
        server: int,
        request: pb.StreamGenerateRequest,
        known: Known,
        way: Way,
    ) -> tuple[str, str]:
        """The kind of ending and its fault; empty without a fault."""
        begin = time.monotonic()
        reading = Reading(known, way)
        try:
            await reading.read(stub.StreamGenerate(request, timeout=REQUEST_SECONDS))
        except grpc.aio.AioRpcError as error:
            kind, fault = self._judge(error, server, begin, reading.tokens)
        else:
            kind, fault = reading.judge()
        self.tally.output_tokens += reading.tokens
        self.tally.prompt_tokens += reading.prompt_tokens
        self.tally.cached_tokens += reading.cached_tokens
        self.tally.wrong += bool(reading.fault) or kind == "wrong"
        return kind, reading.fault or fault

    def _judge(self, failure: grpc.aio.AioRpcError, server: int, begin: float, tokens: int) -> tuple[str, str]:
        """The kind of ending for a status, and its fault if the status is unexpected."""
        error, end = from_rpc_error(failure), time.monotonic()
        away = self._away(server, begin - RECONNECT_SECONDS, end)
        seconds = f"after {end - begin:.1f} s and {tokens} tokens"
        match error.reason:
            case "QUEUE_FULL" if not tokens:
                return "queue full", ""
            case "NOT_READY" if not tokens:
                return "server not ready", ""
            case "DRAINING" if away:
                return "server stopped", ""
        if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason and away:
            return DIED, ""
        if error.code is grpc.StatusCode.CANCELLED and not error.reason and not tokens and away:
            # The call came while the server closed: gRPC turns such a call away before a servicer has seen it.
            return "server stopped", ""
        return "failed", f"ended with {error} {seconds}"


# Endings after which a client repeats its request.
DIED = "server died"
RETRIED = ("queue full", "server not ready", "server stopped", DIED)
# The ending of a request that was repeated until its client gave up.
STARVED = "starved"


class Reading:
    """Reads one attempt's answers and compares them as they come."""

    def __init__(self, known: Known, way: Way) -> None:
        self.tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.fault = ""
        self._known = known
        self._way = way
        self._samples = [Sample() for _ in known.samples]
        self._cancelled_at: float | None = None

    async def read(self, call: grpc.aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]) -> None:
        """Reads until the end, or until the client cancels. Raises AioRpcError."""
        loop = asyncio.get_running_loop()
        timer = None
        if self._way.cancel_seconds is not None:
            timer = loop.call_later(self._way.cancel_seconds, self._cancel, call)
        try:
            async for message in call:
                self._take(message)
                if self._way.cancel_tokens is not None and self.tokens >= self._way.cancel_tokens:
                    self._cancel(call)
        except asyncio.CancelledError:
            if self._cancelled_at is None:
                raise
            if time.monotonic() - self._cancelled_at > CANCEL_SECONDS:
                self.fault = "took too long to be cancelled"
        finally:
            if timer is not None:
                timer.cancel()

    def judge(self) -> tuple[str, str]:
        """The kind of an ending without a status, and its fault."""
        if self._cancelled_at is not None and not all(sample.finish_reason for sample in self._samples):
            return "cancelled", ""
        for index, (sample, known) in enumerate(zip(self._samples, self._known.samples, strict=True)):
            if sample != known:
                return "wrong", self.fault or f"sample {index} ended with other output: {_difference(sample, known)}"
        return "exact", ""

    def _cancel(self, call: grpc.aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]) -> None:
        if self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
            call.cancel()

    def _take(self, message: pb.StreamGenerateResponse) -> None:
        sample = self._samples[message.sample_index]
        if sample.finish_reason:
            self.fault = "output after a sample's end"
        sample.take(message)
        self.tokens += len(message.token_ids)
        self.prompt_tokens += message.usage.prompt_tokens
        self.cached_tokens += message.usage.cached_tokens
        known = self._known.samples[message.sample_index]
        if not self.fault and not sample.begins(known):
            self.fault = f"other output: {_difference(sample, known)}"


def _difference(sample: Sample, known: Sample) -> str:
    """The position where two outputs begin to differ, without their texts."""
    same = 0
    with contextlib.suppress(IndexError):
        while sample.token_ids[same] == known.token_ids[same]:
            same += 1
    return (
        f"{same} tokens are the same of {len(sample.token_ids)} and {len(known.token_ids)}, "
        f"texts of {len(sample.text)} and {len(known.text)} characters, "
        f"{pb.FinishReason.Name(sample.finish_reason)} and {pb.FinishReason.Name(known.finish_reason)}"
    )


def decorated(request: pb.StreamGenerateRequest, rng: random.Random) -> pb.StreamGenerateRequest:
    """The same request with options that cannot change its output: priority, salt, tenant, use of the cache."""
    copy = pb.StreamGenerateRequest()
    copy.CopyFrom(request)
    copy.priority = rng.choice((0, 0, 0, -1, 1))
    if rng.random() < 0.2:
        copy.cache.salt = rng.choice("ab")
    if rng.random() < 0.2:
        copy.cache.tenant_id = rng.choice(("one", "two"))
    copy.cache.no_read |= rng.random() < 0.05
    copy.cache.no_store |= rng.random() < 0.05
    if not copy.cache.retention_ranges and rng.random() < 0.2:
        copy.cache.retention_ranges.add(start=0, retention_priority=rng.randrange(101))
    return copy


def drawn_way(known: Known, rng: random.Random) -> Way:
    """Some requests are cancelled before the first token, some in the middle, some at the end."""
    if rng.random() >= CANCELLED_SHARE:
        return Way()
    if rng.random() < 0.3:
        return Way(cancel_seconds=rng.uniform(0, 0.5))
    return Way(cancel_tokens=rng.randint(1, max(1, known.tokens)))
