"""Callers that send requests without end and sometimes disconnect: the same conversations over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any, Protocol

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.errors import from_rpc_error
from scheduler.frontend.openai import translate
from scheduler.frontend.openai.requests import ChatCompletionRequest, CompletionRequest

# English technical prose that comes with every Python.
TEXT = "\n\n".join(text for _, text in sorted(topics.items()))
# Share of conversations with a shared first message; number of these messages; their length in characters.
SHARED_SHARE, SHARED_MESSAGES, SHARED_CHARACTERS = 0.5, 8, 600
# Ranges, evenly distributed on a logarithmic scale: characters of each conversation's own text, and output tokens.
OWN_CHARACTERS, OUTPUT_TOKENS = (20, 800), (16, 128)
LEAVING_SHARE = 0.1
# A stream that sends no piece for this time hangs. Before its first piece, it may have to wait for many streams.
SILENT_SECONDS = 300.0


@dataclass(frozen=True)
class Ask:
    """One request of OpenAI's API, a chat or a plain text. leaves_after: the caller disconnects after this many pieces.

    A caller that disconnects has a unique salt, by which its sequence can be found.
    """

    body: dict[str, Any]
    leaves_after: int | None = None

    @property
    def salt(self) -> str:
        """The request's salt; empty if it has none."""
        return str(self.body.get("cache_salt", ""))

    @property
    def is_chat(self) -> bool:
        """Whether the request is a conversation."""
        return "messages" in self.body

    def message(self) -> pb.StreamGenerateRequest:
        """The same request over gRPC."""
        if self.is_chat:
            return translate.chat(ChatCompletionRequest.model_validate(self.body))
        [message] = translate.completion(CompletionRequest.model_validate(self.body))
        return message


# The seed, which tells the stub executor the time of a step in microseconds.
Step = int | None
# Waits until no sequence with this salt holds blocks; returns the seconds since a time on the monotonic clock.
Freed = Callable[[str, float], Awaitable[float]]


@dataclass(frozen=True)
class Usage:
    """Tokens of an answer that is complete."""

    prompt: int
    cached: int
    output: int


class RefusedError(Exception):
    """Too many requests wait already."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("refused")
        self.retry_after = retry_after


class FailedError(Exception):
    """The answer is not as requested; the message describes it."""


def ask(content: str, output_tokens: int, *, system: str = "", salt: str = "", leaves: int | None, step: Step) -> Ask:
    """A greedy stream of exactly `output_tokens` tokens; a plain text for a stub, which has no chat template."""
    messages = [{"role": "system", "content": system}] if system else []
    body = {
        "model": "",
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if step is None:
        body["messages"] = [*messages, {"role": "user", "content": content}]
    else:
        body |= {"prompt": system + content, "seed": step}
    return Ask(body | ({"cache_salt": salt} if salt else {}), leaves)


def _piece(rng: random.Random, characters: int) -> str:
    begin = rng.randrange(len(TEXT) - characters)
    return TEXT[begin : begin + characters]


def _log_uniform(rng: random.Random, shortest: int, longest: int) -> int:
    return round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))


def draw(rng: random.Random, step: Step) -> Ask:
    """The next request of a caller."""
    shared = random.Random(rng.randrange(SHARED_MESSAGES)) if rng.random() < SHARED_SHARE else None
    system = _piece(shared, SHARED_CHARACTERS) if shared else ""
    tokens = _log_uniform(rng, *OUTPUT_TOKENS)
    content = _piece(rng, _log_uniform(rng, *OWN_CHARACTERS))
    leaves = rng.randint(1, tokens // 2) if rng.random() < LEAVING_SHARE else None
    salt = f"leaver-{rng.getrandbits(64):x}" if leaves else ""
    return ask(content, tokens, system=system, salt=salt, leaves=leaves, step=step)


class Way(Protocol):
    """A way to send a conversation to the scheduler and to read the answer."""

    def pieces(self, ask: Ask) -> AsyncGenerator[Usage | None, None]:
        """Yields each piece of the output as it arrives, the last with its usage. Closing the generator disconnects.

        Raises RefusedError and FailedError.
        """


class Http:
    """Opens a connection for each request. Written by hand to be cheap: common clients take more time than servers."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")

    async def pieces(self, ask: Ask) -> AsyncGenerator[Usage | None, None]:
        """Yields server-sent events, of which it reads only the first characters."""
        ended = False
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(http_request(ask))
                await _status(reader)
                while chunk := await _within(reader.readline()):
                    event = (await _within(reader.readexactly(int(chunk, 16) + 2)))[:-4]
                    if event.startswith(b'data: {"error"'):
                        raise FailedError(event.decode())
                    if event == b"data: [DONE]":
                        ended = True
                        break
                    yield _usage(event) if b'"choices":[]' in event else None
            finally:
                writer.close()
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            raise FailedError(f"{type(error).__name__}: {error}") from error
        if not ended:
            raise FailedError("ended without [DONE]")


def http_request(ask: Ask) -> bytes:
    """The bytes of an HTTP request."""
    content = json.dumps(ask.body).encode()
    path = "/v1/chat/completions" if ask.is_chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + content


async def _status(reader: asyncio.StreamReader) -> None:
    """Reads the head of an answer. Raises RefusedError and FailedError unless a stream follows."""
    status, *lines = (await _within(reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if status == "HTTP/1.1 200 OK":
        return
    content = (await _within(reader.readexactly(int(headers["content-length"])))).decode()
    if status.startswith("HTTP/1.1 429 ") and "retry-after" in headers:
        raise RefusedError(float(headers["retry-after"]))
    raise FailedError(f"{status}: {content}")


async def _within(reading: Coroutine[Any, Any, bytes]) -> bytes:
    async with asyncio.timeout(SILENT_SECONDS):
        return await reading


def _usage(event: bytes) -> Usage:
    usage = json.loads(event.removeprefix(b"data: "))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


class Grpc:
    """Sends all requests over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)

    async def pieces(self, ask: Ask) -> AsyncGenerator[Usage | None, None]:
        """Yields the messages of a call; closing the generator cancels the call."""
        call = self._stub.StreamGenerate(ask.message(), timeout=600)
        try:
            async for message in call:
                usage = message.usage
                yield (
                    Usage(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
                    if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
                    else None
                )
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after is not None:
                raise RefusedError(error.retry_after) from failure
            raise FailedError(str(error)) from failure
        finally:
            call.cancel()


@dataclass
class Tally:
    """The outcomes of all requests; times in seconds. refused: counts attempts, each of which is repeated.

    freed: times from disconnecting until the blocks were free.
    """

    ended: int = 0
    left: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    freed: array[float] = field(default_factory=lambda: array("d"))


class Load:
    """`streams` concurrent callers, each with one conversation after the other. Use it in an async with statement."""

    def __init__(self, way: Way, freed: Freed, *, streams: int, seed: int, step: Step) -> None:
        self.tally = Tally()
        self._way = way
        self._freed = freed
        self._streams = streams
        self._seed = seed
        self._step = step
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._caller(number)) for number in range(self._streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnects all callers at once, even in an answer. Raises errors that no caller should meet."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError | None):
                raise outcome

    async def _caller(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while True:
            await self._ask(draw(rng, self._step))

    async def _ask(self, ask: Ask) -> None:
        """Sends the request again whenever the answer says to retry."""
        while True:
            try:
                return await self._read(ask)
            except RefusedError as refusal:
                self.tally.refused += 1
                await asyncio.sleep(refusal.retry_after)
            except FailedError as error:
                self.tally.errors[str(error)] += 1
                return None

    async def _read(self, ask: Ask) -> None:
        tally, before, count, usage = self.tally, time.monotonic(), 0, None
        async with contextlib.aclosing(self._way.pieces(ask)) as pieces:
            async for usage in pieces:
                if usage is None:
                    now = time.monotonic()
                    (tally.gaps if count else tally.first).append(now - before)
                    before = now
                    count += 1
                    if count == ask.leaves_after:
                        break
        if usage is None:
            tally.left += 1
            tally.freed.append(await self._freed(ask.salt, before))
            return
        if usage.output != ask.body["max_tokens"]:
            raise FailedError("another number of tokens than was asked for")
        tally.ended += 1
        tally.prompt_tokens += usage.prompt
        tally.cached_tokens += usage.cached
        tally.output_tokens += usage.output
