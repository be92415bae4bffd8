"""Sends each request when it is due, whatever happens to earlier requests, and records when its tokens arrive.

It runs as a separate process, `python -m bench.fleet.client`. It reads the workload as JSON from standard input, and
writes events and answers as lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import uvloop

from bench.fleet.workload import Request
from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.channel import open_channel

GENERATE = "/generation.v1.GenerationService/StreamGenerate"
DEADLINE_SECONDS = 600.0
# Connections are made and everything is ready this long before the first request can be due.
READY_SECONDS = 0.5


@dataclass
class Answer:
    """The outcome of a request; times in seconds since the stage began, None for events that never came.

    code: status of the error, OK without an error. counted: output tokens that came within the measured time.
    """

    due: float
    target: int
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted: int = 0
    code: str = "OK"


@dataclass
class Ask:
    """The client's workload: requests in the order of their times. They go to the targets in turns."""

    targets: Sequence[str]
    requests: Sequence[Request]
    measured_from: float
    measured_until: float

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Ask:
        """From JSON."""
        values = json.loads(text)
        requests = values.pop("requests")
        for one in requests:
            one["contents"] = tuple(map(tuple, one["contents"]))
        return Ask(requests=[Request(**one) for one in requests], **values)


def message(request: Request) -> bytes:
    """The request as it is sent."""
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=request.tokens()),
        max_tokens=request.output_tokens,
        ignore_eos=True,
        cache=pb.CacheOptions(session_id=request.session),
    ).SerializeToString()


@dataclass
class Client:
    """Sends the requests of one stage."""

    ask: Ask
    answers: list[Answer] = field(default_factory=list)

    async def run(self) -> None:
        """Runs the stage; returns when the last request has ended."""
        targets = self.ask.targets
        self.answers = [Answer(one.at, index % len(targets)) for index, one in enumerate(self.ask.requests)]
        messages = [message(one) for one in self.ask.requests]
        channels = [open_channel(target) for target in targets]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        # Sends and receives bytes: the client shares the machine with the measured processes.
        calls = [channel.unary_stream(GENERATE) for channel in channels]
        begin = time.monotonic() + READY_SECONDS
        telling = asyncio.create_task(self._tell(begin))
        running = []
        for content, answer in zip(messages, self.answers, strict=True):
            await asyncio.sleep(begin + answer.due - time.monotonic())
            running.append(asyncio.create_task(self._one(calls[answer.target], content, answer, begin)))
        await asyncio.gather(telling, *running)
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _tell(self, begin: float) -> None:
        """Reports when the measured time begins and ends."""
        for event, at in (("begun", self.ask.measured_from), ("ended", self.ask.measured_until)):
            await asyncio.sleep(begin + at - time.monotonic())
            say({"event": event})

    async def _one(self, call: Any, content: bytes, answer: Answer, begin: float) -> None:
        answer.sent = time.monotonic() - begin
        pieces: list[tuple[float, bytes]] = []
        try:
            # A comprehension would lose the pieces that came before an error.
            async for piece in call(content, timeout=DEADLINE_SECONDS):
                pieces.append((time.monotonic() - begin, piece))  # noqa: PERF401
        except grpc.aio.AioRpcError as error:
            answer.code = error.code().name
        for at, piece in pieces:
            part = pb.StreamGenerateResponse.FromString(piece)
            count = len(part.token_ids)
            if count:
                answer.first = at if answer.first is None else answer.first
                answer.last = at
                answer.output_tokens += count
                answer.counted += count * (self.ask.measured_from <= at <= self.ask.measured_until)
            if part.finish_reason:
                answer.prompt_tokens = part.usage.prompt_tokens
                answer.cached_tokens = part.usage.cached_tokens


def say(line: dict[str, Any]) -> None:
    """Sends a line to the parent. The line must be short: without buffering, a signal may cut off a long line."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """Runs one stage."""
    client = Client(Ask.parse(sys.stdin.read()))
    uvloop.run(client.run())
    for answer in client.answers:
        say({"event": "answer", "answer": asdict(answer)})
    say({"event": "done"})


if __name__ == "__main__":
    main()
