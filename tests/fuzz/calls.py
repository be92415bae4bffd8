"""Sends calls of gRPC and sees how they end: to the end, left in the middle, or with hardly any time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import from_rpc_error
from tests.fuzz.memory import Memory
from tests.fuzz.messages import Made, Maker
from tests.fuzz.meter import Meter
from tests.fuzz.methods import Method
from tests.fuzz.report import Report
from tests.support.generation import greedy_request
from tests.support.patience import patience

# An answer that takes longer is a hang.
PATIENCE = patience(60)
# A stream that has not ended by itself is left after so long, if one of its method ever has.
_GLANCE = 1.0
# Messages of a stream that are read.
_MOST_READ = 400
_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
# What this side says itself of a stream that ended while it wrote; how it ended, the server's metrics say.
_ENDED_MEANWHILE = "Internal error from Core"
_MOST_TEXT = 1500
_NAMES = ("x-request-id", "traceparent", "tracestate", "authorization", "x-other", "grpc-timeout-x")
_ODD_VALUES = (
    "",
    "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
    "00-" + "f" * 32 + "-" + "f" * 16 + "-01",
    "x" * 2000,
    "Bearer x",
)


class Caller:
    """Calls the methods of one phase; later requests use the knowledge from answers."""

    def __init__(
        self,
        channels: dict[str, grpc.aio.Channel],
        report: Report,
        meter: Meter | None = None,
    ) -> None:
        """meter: measures calls with numbers at bounds, of which there is never more than one at a time."""
        self._channels = channels
        self._report = report
        self._meter = meter
        self._memory = Memory()
        self._maker = Maker(self._memory, at_bounds=meter is not None)
        # Of its many fields some refuse each other: one that is made from nothing is hardly ever generated for.
        known = Made(greedy_request(range(100, 150), 8).SerializeToString())
        self._maker.keep(pb.StreamGenerateRequest, known, random.Random(0))
        # Streams that came to their end by themselves.
        self._ends: Counter[str] = Counter()

    async def call(self, method: Method, rng: random.Random) -> None:
        """One call."""
        metadata = _metadata(rng) if rng.random() < 0.05 else ()
        sent: list[Made] = []
        # A share is given hardly any time, and another is left.
        draw = rng.random()
        timeout = rng.choice((0.0001, 0.001, 0.01, 0.05)) if draw < 0.05 else PATIENCE
        leave = rng.choice((0.0, 0.001, 0.01, 0.1)) if 0.05 <= draw < 0.13 else None
        readings = self._meter.begin() if self._meter else []
        begin = time.monotonic()
        status, details, ended = await self._send(method, rng, sent, timeout, leave, metadata)
        seconds = time.monotonic() - begin
        code = status.name if ended else "left"
        self._report.count(method.name, code, seconds, left=not ended or timeout < PATIENCE)
        call = {"method": method.name, "messages": [made.data.hex() for made in sent], "timeout": timeout}
        if self._meter:
            self._meter.end(readings, method.name, _shown(method, sent), call)
        if status in _FAULTS:
            self._report.fault(f"{code} of {method.name}", f"{details}\n{_shown(method, sent)}", call)
        elif status is grpc.StatusCode.DEADLINE_EXCEEDED and timeout == PATIENCE:
            text = f"no end in {seconds:.0f} s\n{_shown(method, sent)}"
            self._report.hang(f"hang of {method.name}", text, begin, call)

    async def _send(
        self,
        method: Method,
        rng: random.Random,
        sent: list[Made],
        seconds: float,
        leave: float | None,
        metadata: Sequence[tuple[str, str]],
    ) -> tuple[grpc.StatusCode, str, bool]:
        """Status, details, and whether the server ended it."""
        options = {"timeout": seconds, "metadata": metadata}
        read: list[Message] = []
        if method.streams_requests:
            call = _multicallable(self._channels[method.address], method)(self._requests(method, rng, sent), **options)
        else:
            sent.append(self._maker.make(method.request, rng))
            call = _multicallable(self._channels[method.address], method)(sent[0].data, **options)
        if leave is None and method.streams_responses and not self._ends[method.name]:
            leave = rng.uniform(0, _GLANCE)
        try:
            async with asyncio.timeout(leave):
                await self._read(call, method, read)
                status, details = await call.code(), await call.details()
        except TimeoutError:
            call.cancel()
            self._learn(method, sent, read, rng)
            return grpc.StatusCode.CANCELLED, "", False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Of the call, by the server: the library raises it as if this task were to end, which then did.
            return grpc.StatusCode.CANCELLED, "", True
        except grpc.aio.AioRpcError as error:
            status, details = error.code(), error.details() or ""
            self._mend(method, sent, from_rpc_error(error).fields)
        self._learn(method, sent, read, rng)
        if details == _ENDED_MEANWHILE:
            return grpc.StatusCode.CANCELLED, "", True
        if status is grpc.StatusCode.OK:
            self._ends[method.name] += 1
        return status, details or "", True

    def _learn(self, method: Method, sent: Sequence[Made], read: Sequence[Message], rng: random.Random) -> None:
        if not read:
            return
        for message in read[:20]:
            self._memory.learn(message)
        for made in sent:
            with contextlib.suppress(DecodeError):
                self._memory.learn(method.request.FromString(made.data))
                self._maker.keep(method.request, made, rng)

    def _mend(self, method: Method, sent: Sequence[Made], fields: Mapping[str, str]) -> None:
        for made in sent if fields else ():
            with contextlib.suppress(DecodeError):
                self._maker.mend(method.request, made, fields)

    async def _read(self, call: Any, method: Method, read: list[Message]) -> None:
        if not method.streams_responses:
            read.append(await call)
            return
        async for message in call:
            if len(read) < _MOST_READ:
                read.append(message)
            if method.streams_requests:
                # For requests that are still to be sent.
                self._memory.learn(message)

    async def _requests(self, method: Method, rng: random.Random, sent: list[Made]) -> AsyncIterator[bytes]:
        """Makes several requests, in any order; each request knows the earlier answers."""
        for number in range(rng.choice((0, 1, 1, 2, 3, 4, 8))):
            sent.append(self._maker.make(method.request, rng, first=not number))
            yield sent[-1].data
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.02)))


def _multicallable(channel: grpc.aio.Channel, method: Method) -> Any:
    kind = f"{'stream' if method.streams_requests else 'unary'}_{'stream' if method.streams_responses else 'unary'}"
    return getattr(channel, kind)(f"/{method.name}", response_deserializer=method.response.FromString)


def _metadata(rng: random.Random) -> list[tuple[str, str]]:
    names = rng.sample(_NAMES, rng.randrange(1, 4))
    return [(name, rng.choice(_ODD_VALUES)) for name in names]


def _shown(method: Method, sent: Sequence[Made]) -> str:
    """The messages as text, if there are any."""
    shown = []
    for data, *_ in sent:
        try:
            text = text_format.MessageToString(method.request.FromString(data), as_one_line=True)
        except DecodeError:
            text = f"bytes {data.hex()}"
        shown.append(f"  {text[:_MOST_TEXT]}")
    return "\n".join(shown)


async def repeat(channel: grpc.aio.Channel, method: Method, messages: Sequence[bytes]) -> str:
    """Sends messages again; how it ended, in words."""

    async def requests() -> AsyncIterator[bytes]:
        for data in messages:
            yield data

    call = _multicallable(channel, method)(requests() if method.streams_requests else messages[0], timeout=PATIENCE)
    try:
        answers = [answer async for answer in call] if method.streams_responses else [await call]
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return f"OK with {len(answers)} answers: {answers[:1]}"
