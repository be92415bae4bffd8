"""Bodies on their way to the HTTP API: bounds of their callers, time and size."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from protos.rpc.guard import Guard
from protos.rpc.identity import Role
from scheduler.frontend.openai import bodies
from scheduler.frontend.openai.app import create_app
from tests.support.keyring import Keyring
from tests.support.scheduler.http import JSON, LEAST, ask, serve, starting_service
from tests.support.scheduler.stack import Stack, StackFactory

PATH = "/v1/completions"
# What of this is beyond the free part fits once into what is held, and not twice.
LARGE, MAX_PROMPT = 200_000, 50_000


@contextlib.asynccontextmanager
async def sending(address: str, body: bytes, length: int) -> AsyncIterator[asyncio.StreamReader]:
    """A request of which so much is sent; its answer."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        yield reader
    finally:
        # Closes without waiting for unread bytes.
        writer.transport.abort()


def padded(size: int = LARGE, **fields: object) -> bytes:
    return json.dumps(LEAST | fields).encode().ljust(size)


async def test_the_body_of_an_unknown_caller_is_not_read(stack: Stack, keyring: Keyring) -> None:
    keyring.add(Role.CALLER)
    async with serve(stack.scheduler.service, guard=Guard(keyring.file, None)) as address:
        assert (await ask(address, "POST", PATH, "{")).status == 401
        async with sending(address, b"{", 1000) as answer:
            assert b" 401 " in await answer.readline()


async def test_a_compressed_body_is_refused(address: str) -> None:
    headers = JSON | {"Content-Encoding": "gzip"}
    answer = await ask(address, "POST", PATH, gzip.compress(json.dumps(LEAST).encode()), headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    assert answer.error["message"] == "the body is compressed: send it without Content-Encoding"
    plain = await ask(address, "POST", PATH, json.dumps(LEAST), JSON | {"Content-Encoding": "identity"})
    assert plain.status == 200


async def test_a_slow_body_is_refused(stack: Stack, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ARRIVAL_SECONDS", 0.5)
    async with sending(address, b"{", 1000) as answer:
        # To its end: the connection is closed.
        said = (await answer.read()).decode()
    assert " 408 " in said
    assert '"message":"the body did not arrive within 0.5 seconds"' in said
    # An answer may take longer.
    stack.executor.step_seconds = 0.2
    assert (await ask(address, "POST", PATH, json.dumps(LEAST | {"max_tokens": 5}))).status == 200


async def test_all_bodies_together_are_bounded(run_stack: StackFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "HELD_BYTES", LARGE)
    async with run_stack() as stack, serve(stack.scheduler.service, max_prompt_bytes=MAX_PROMPT) as address:
        async with sending(address, b" " * (LARGE - 1), LARGE):
            while (refused := await ask(address, "POST", PATH, padded())).status != 503:
                # It takes a moment until the other one is there.
                await asyncio.sleep(0.01)
            assert refused.headers["Retry-After"] == "1"
            assert refused.error["type"] == "server_error"
            assert (await ask(address, "POST", PATH, padded(60_000))).status == 200
        while (await ask(address, "POST", PATH, padded())).status != 200:
            await asyncio.sleep(0.01)


async def test_a_body_is_released_once_it_is_parsed(run_stack: StackFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "HELD_BYTES", LARGE)
    async with run_stack() as stack, serve(stack.scheduler.service, max_prompt_bytes=MAX_PROMPT) as address:
        stack.executor.step_seconds = 0.02
        async with sending(address, padded(max_tokens=300, stream=True), LARGE) as answer:
            await answer.readuntil(b"data: ")
            assert (await ask(address, "POST", PATH, padded())).status == 200
            assert stack.metric("running_requests") == 1


async def test_a_body_with_too_many_values_is_not_parsed(run_stack: StackFactory) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service, max_prompt_bytes=1 << 20) as address:
        many = '{"prompt": "x", "user": [' + "[]," * (bodies.MAX_MARKS // 2) + "1]}"
        answer = await ask(address, "POST", PATH, many)
        assert (answer.status, answer.error["code"]) == (413, "request_entity_too_large")
        assert "commas" in answer.error["message"]
        ids = '{"prompt": [' + "1," * 100_000 + "1]}"
        assert "tokens; at most" in (await ask(address, "POST", PATH, ids)).error["message"]


def test_the_description_has_a_bearer_token() -> None:
    described = create_app(starting_service(), max_prompt_bytes=1).openapi()
    scheme = described["components"]["securitySchemes"]["bearer"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path, methods in described["paths"].items():
        is_open = path in ("/health", "/ping", "/version", "/metrics")
        assert all(method.get("security") == (None if is_open else [{"bearer": []}]) for method in methods.values())
