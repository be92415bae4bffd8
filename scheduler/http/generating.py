"""Runs a request of HTTP and answers it, at once or as events, for as long as the caller is there."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from scheduler.http.errors import from_service
from scheduler.http.formats import Format, Sample
from scheduler.http.front import FAILED
from scheduler.http.identity import Caller
from scheduler.http.translate import Names
from scheduler.service import GenerationService

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Generating(Response):
    """All of it happens where the answer is sent: whatever ends that ends the request and frees what it held."""

    def __init__(
        self,
        service: GenerationService,
        caller: Caller,
        message: pb.StreamGenerateRequest,
        form: Format,
        names: Names,
        *,
        stream: bool,
    ) -> None:
        """The request gets the name of its answer. names: what the message's fields are called in errors."""
        message.request_id = form.id
        self._service = service
        self._caller = caller
        self._message = message
        self._format = form
        self._names = names
        self._stream = stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError as long as nothing was sent."""
        work = self._send_events(scope, send) if self._stream else self._send_whole(scope, receive, send)
        await _while_connected(receive, work)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        samples = [Sample(index) for index in range(self._samples)]

        async def add(piece: pb.StreamGenerateResponse) -> None:
            samples[piece.sample_index].add(piece)

        try:
            with self._caller.asking():
                await self._service.generate(self._message, add)
        except ServiceError as error:
            raise from_service(error, self._names) from error
        await JSONResponse(self._format.whole(samples))(scope, receive, send)

    async def _send_events(self, scope: Scope, send: Send) -> None:
        """The first output decides about the status: what goes wrong later is an event."""
        events = _Events(send, self._format)
        try:
            with self._caller.asking():
                await self._service.generate(self._message, events.write)
        except ServiceError as error:
            refusal = from_service(error, self._names)
            if not events.begun:
                raise refusal from error
            scope[FAILED] = refusal.status
            await events.send(refusal.body)
        else:
            if self._format.include_usage:
                await events.send(self._format.usage_chunk(events.usages))
            await events.send_bytes(b"data: [DONE]\n\n")
        await events.send_bytes(b"", more=False)

    @property
    def _samples(self) -> int:
        return self._message.n if self._message.HasField("n") else 1


class _Events:
    """Server-sent events. begun: the status is sent."""

    def __init__(self, send: Send, form: Format) -> None:
        self.begun = False
        self.usages: list[pb.Usage] = []
        self._send = send
        self._format = form
        # Characters of each sample that were sent.
        self._sent: dict[int, int] = {}

    async def write(self, piece: pb.StreamGenerateResponse) -> None:
        first = piece.sample_index not in self._sent
        sample = Sample(offset=self._sent.setdefault(piece.sample_index, 0))
        sample.add(piece)
        self._sent[piece.sample_index] += len(piece.text)
        if piece.finish_reason:
            self.usages.append(piece.usage)
        if first or self._format.says_something(sample):
            await self.send(self._format.chunk(sample, first=first))

    async def send(self, event: Any) -> None:
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        await self.send_bytes(f"data: {data}\n\n".encode())

    async def send_bytes(self, data: bytes, *, more: bool = True) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Works until all is done, or until the caller is gone."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
