"""Runs an HTTP request and answers it, whole or as events, while the caller stays connected."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from protos.rpc.http_server import peer_of
from scheduler.errors import DrainingError
from scheduler.frontend.grpc_service import GenerationService
from scheduler.frontend.openai.errors import ApiError, from_service, unexpected
from scheduler.frontend.openai.identity import Caller
from scheduler.frontend.openai.middleware import FAILED
from scheduler.frontend.openai.response_builder import ResponseBuilder, merged
from scheduler.frontend.openai.translate import Names, of_prompt
from scheduler.request import Request as Sample

Write = Callable[[pb.StreamGenerateResponse], Awaitable[object]]

# How long the process waits at most to send the event that says why a stream ends.
_LAST_WORD_SECONDS = 0.5
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationResponse(Response):
    """Runs the request while the response is sent: the end of one is the end of the other."""

    def __init__(
        self,
        service: GenerationService,
        caller: Caller,
        messages: Sequence[pb.StreamGenerateRequest],
        builder: ResponseBuilder,
        names: Names,
        *,
        stream: bool,
    ) -> None:
        """messages: differ only in their prompts. names: the names of their fields in errors.

        A request gets the id of its response; if there are several requests, each has its number appended.
        """
        for number, message in enumerate(messages):
            message.request_id = builder.id if len(messages) == 1 else f"{builder.id}-{number}"
        self._service = service
        self._caller = caller
        self._messages = messages
        self._builder = builder
        self._names = names
        self._stream = stream
        self._samples = messages[0].n if messages[0].HasField("n") else 1
        self._caller_left = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request. Raises ApiError, but only before anything is sent."""
        work = self._send_events(scope, send) if self._stream else self._send_whole(scope, receive, send)
        await self._while_connected(receive, work)

    async def _while_connected(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until its end, or until the caller leaves."""
        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._caller_left = gone.done()
            working.cancel()
            gone.cancel()
            await asyncio.wait({working, gone})
        if not working.cancelled():
            working.result()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Created on output rather than from the requested number, which is not validated yet.
        samples: defaultdict[int, list[pb.StreamGenerateResponse]] = defaultdict(list)

        async def add(piece: pb.StreamGenerateResponse) -> None:
            samples[piece.sample_index].append(piece)

        await self._generate(scope, add)
        whole = self._builder.whole([self._builder.begun(merged(samples[index])) for index in sorted(samples)])
        await JSONResponse(whole)(scope, receive, send)

    async def _send_events(self, scope: Scope, send: Send) -> None:
        """The status is sent with the first output: any later error is an event."""
        events = _Events(send, self._builder)
        try:
            await self._generate(scope, events.write)
        except ApiError as refusal:
            if not events.begun:
                raise
            await events.end(scope, refusal)
            return
        except asyncio.CancelledError:
            if self._caller_left:
                raise
            # The process is ending and does not wait for a caller that does not read.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    await events.end(scope, from_service(DrainingError("the scheduler is stopping")))
            raise
        except Exception:
            await events.end(scope, unexpected())
            raise
        else:
            if self._builder.include_usage:
                await events.send_usage()
            await events.send_bytes(b"data: [DONE]\n\n")
        await events.send_bytes(b"", more=False)

    async def _generate(self, scope: Scope, write: Write) -> None:
        """Runs all prompts; the first error cancels the others. Raises ApiError."""
        try:
            with self._caller.authorized():
                self._service.check_samples(len(self._messages), self._samples)
                if len(self._messages) == 1:
                    await self._run(0, self._messages[0], write)
                    return
                async with asyncio.TaskGroup() as tasks:
                    for number, message in enumerate(self._messages):
                        tasks.create_task(self._generate_one(scope, number, message, write))
        except ServiceError as error:
            raise from_service(error, self._names) from error
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _run(self, number: int, message: pb.StreamGenerateRequest, write: Write) -> None:
        def accept(samples: Sequence[Sample]) -> None:
            self._builder.accept(number * self._samples, samples)

        await self._service.generate(
            message, write, usage=self._builder.continuous_usage, part_of=self._builder.id, accept=accept
        )

    async def _generate_one(self, scope: Scope, number: int, message: pb.StreamGenerateRequest, write: Write) -> None:
        """Runs one of several prompts, with its own line in the access log."""

        async def add(piece: pb.StreamGenerateResponse) -> None:
            piece.sample_index += number * self._samples
            await write(piece)

        try:
            with self._service.access_log.call(peer_of(Request(scope))):
                await self._run(number, message, add)
        except ServiceError as error:
            raise from_service(error, of_prompt(self._names, number)) from error


class _Events:
    """Server-sent events. begun: whether the status has been sent."""

    def __init__(self, send: Send, builder: ResponseBuilder) -> None:
        self.begun = False
        # The latest usage of each sample.
        self._usages: dict[int, pb.Usage] = {}
        self._send = send
        self._builder = builder
        # Prompts run concurrently.
        self._turn = asyncio.Lock()
        # Sent characters of each sample.
        self._sent: dict[int, int] = {}

    async def write(self, piece: pb.StreamGenerateResponse) -> None:
        first = piece.sample_index not in self._sent
        offset = self._sent.get(piece.sample_index, 0)
        if first:
            piece = self._builder.begun(piece)
        self._sent[piece.sample_index] = offset + len(piece.text)
        if piece.HasField("usage"):
            self._usages[piece.sample_index] = piece.usage
        chunk = self._builder.chunk(piece, self._usages.values(), first=first, offset=offset)
        if chunk is not None:
            await self.send(chunk)

    async def send_usage(self) -> None:
        await self.send(self._builder.usage_chunk(self._usages.values()))

    async def end(self, scope: Scope, error: ApiError) -> None:
        """Sends the error as the last event; sends nothing if the status has not been sent."""
        if self.begun:
            scope[FAILED] = error.status
            await self.send(error.body)
            await self.send_bytes(b"", more=False)

    async def send(self, event: Any) -> None:
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        await self.send_bytes(f"data: {data}\n\n".encode())

    async def send_bytes(self, data: bytes, *, more: bool = True) -> None:
        async with self._turn:
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
