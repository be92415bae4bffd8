"""The HTTP API of a service for tests, and plain calls of it."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import openai
from prometheus_client import CollectorRegistry

from protos.rpc.http_server import HttpServer
from scheduler.errors import NotReadyError
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.grpc_service import GenerationService
from scheduler.frontend.openai.app import create_app
from scheduler.frontend.requests import RequestTable
from scheduler.metrics import RequestMetrics
from tests.support.patience import patience

JSON = {"Content-Type": "application/json"}
HELLO = {"role": "user", "content": "hello"}
LEAST = {"prompt": "the cat", "max_tokens": 3, "temperature": 0}


@contextlib.asynccontextmanager
async def serve(service: GenerationService, *, own_names: bool = False, **options: Any) -> AsyncIterator[str]:
    """The API of a service; its address."""
    app = create_app(service, **{"max_prompt_bytes": 1000, "registry": CollectorRegistry()} | options)
    server = HttpServer(app, "127.0.0.1:0", own_names=own_names)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def client(address: str, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0) as client:
        yield client


def parent(model: openai.types.Model) -> str | None:
    """The base model of an adapter, for which OpenAI's type has no field."""
    return (model.model_extra or {})["parent"]


class Answer:
    """Status, headers and body."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read().decode()

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have exactly OpenAI's shape."""
        answer = json.loads(self.body)
        assert list(answer) == ["error"]
        assert sorted(answer["error"]) == ["code", "message", "param", "type"]
        return dict(answer["error"])


async def ask(
    address: str, method: str, path: str, body: bytes | str | Iterator[bytes] | None = None,
    headers: Mapping[str, str] = JSON,
) -> Answer:  # fmt: skip
    """A plain call without a client library."""

    def call() -> Answer:
        connection = http.client.HTTPConnection(address, timeout=patience(30))
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            return Answer(connection.getresponse())

    return await asyncio.to_thread(call)


class _Starting:
    @property
    def requests(self) -> RequestTable:
        raise NotReadyError("the scheduler still waits for the executor and the cache manager", retry_after=1.0)


def starting_service() -> GenerationService:
    """The service of a scheduler that still waits for its neighbours."""
    return GenerationService(_Starting(), AccessLog(RequestMetrics(CollectorRegistry())))


async def first_event(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins a long stream."""
    body = json.dumps(LEAST | {"max_tokens": 300, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    await reader.readuntil(b"data: ")
