"""What callers may do to a server of HTTP before a request is known: no more than a few bytes, for a few seconds."""

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from protos.rpc import http_connection
from protos.rpc.http_connection import MAX_HEADER_BYTES, MAX_HEADERS, MAX_QUEUED
from protos.rpc.http_server import HttpServer
from tests.support.patience import patience

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
# As much as a caller sends that would never end by itself.
MOST_SENT = 64 << 20


class App:
    """Answers with the length of the body; to /hold when `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/hold":
            self.begun.set()
            await self.gate.wait()
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message["body"]), message["more_body"]
        await PlainTextResponse(f"{size} bytes")(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[str]:
    server = HttpServer(app, "127.0.0.1:0", name="door")
    await server.start()
    try:
        yield server.address
    finally:
        app.gate.set()
        await server.stop(hurried=True)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with serving(App()) as address:
        yield address


async def connect(address: str, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(sent)
    return reader, writer


async def exchange(address: str, sent: bytes) -> bytes:
    """All that is received until the server closes."""
    reader, writer = await connect(address, sent)
    with contextlib.closing(writer):
        return await rest(reader)


async def rest(reader: asyncio.StreamReader) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(patience(30)):
            while data := await reader.read(1 << 16):
                received += data
    return received


def refused(reason: str) -> float:
    labels = {"server": "door", "reason": reason}
    return REGISTRY.get_sample_value("kvkeep_http_refused_connections_total", labels) or 0


async def send_on(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Sends a piece again and again until the server hangs up; the bytes that were sent."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < MOST_SENT:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
    return sent


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (GET, b"X-A: " + b"a" * 1000 + b"\r\n"),
        (GET + b"X-A: ", b"a" * 1000),
        (b"GET /", b"a" * 1000),
        (POST + b"0\r\n", b"X-A: " + b"a" * 1000 + b"\r\n"),
        (POST + b"0\r\nX-A: ", b"a" * 1000),
        (POST + b"5;", b"a" * 1000),
    ],
    ids=["headers", "header", "url", "trailers", "trailer", "chunk extension"],
)
async def test_what_has_no_end_is_cut_off(address: str, head: bytes, piece: bytes) -> None:
    before = refused("headers_too_large")
    reader, writer = await connect(address, head)
    with contextlib.closing(writer):
        assert await send_on(writer, piece * 50) < MOST_SENT
    assert (await rest(reader))[:13] in (b"HTTP/1.1 431 ", b"")
    assert refused("headers_too_large") == before + 1


async def test_headers_may_be_as_many_and_as_large_as_it_says(address: str) -> None:
    close = b"Connection: close\r\n"
    many = b"".join(b"X-%d: a\r\n" % number for number in range(MAX_HEADERS))
    assert (await exchange(address, GET + many + b"\r\n")).startswith(b"HTTP/1.1 431 ")
    assert b"256 headers" in await exchange(address, GET + many + b"\r\n")
    few = many[: many.index(b"X-%d:" % (MAX_HEADERS - 2))]
    assert (await exchange(address, GET + few + close + b"\r\n")).startswith(b"HTTP/1.1 200 ")
    for size, status in ((MAX_HEADER_BYTES - 100, 200), (MAX_HEADER_BYTES + 100, 431)):
        answer = await exchange(address, GET + close + b"X-A: " + b"a" * size + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status), size


async def test_few_requests_wait_behind_one_that_is_being_answered() -> None:
    app = App()
    hold = GET.replace(b" / ", b" /hold ") + b"\r\n"
    last = GET + b"Connection: close\r\n\r\n"
    async with serving(app) as address:
        reader, writer = await connect(address, hold + (GET + b"\r\n") * (MAX_QUEUED - 1) + last)
        with contextlib.closing(writer):
            await app.begun.wait()
            app.gate.set()
            assert (await rest(reader)).count(b" 200 OK") == 1 + MAX_QUEUED
        app.gate.clear()
        before = refused("too_many_requests")
        answer = await exchange(address, hold + (GET + b"\r\n") * 10_000)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert answer.count(b"HTTP/1.1") == 1
        assert refused("too_many_requests") == before + 1


async def test_many_small_requests_and_a_large_body_are_not_taken_for_headers(address: str) -> None:
    reader, writer = await connect(address)
    with contextlib.closing(writer):
        for _ in range(40):
            writer.write((GET + b"X-A: " + b"a" * 4000 + b"\r\n\r\n") * 10)
            for _ in range(10):
                await reader.readuntil(b"0 bytes")
        # One byte in each chunk is more framing than content.
        writer.write(POST + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        await reader.readuntil(b"100000 bytes")


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        GET,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + GET,
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx" + b"POST",
    ],
    ids=["nothing", "half a header", "half of a second request", "the beginning of a third"],
)
async def test_a_connection_without_a_request_is_closed(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough for all data that is sent at once.
    monkeypatch.setattr(http_connection, "REQUEST_SECONDS", 0.5)
    async with serving(App()) as address:
        before = refused("no_request")
        received = await exchange(address, begun)
        assert refused("no_request") == before + 1
        assert received.count(b"HTTP/1.1 200 ") == begun.count(b"\r\n\r\n")


async def test_a_request_that_is_being_served_or_sent_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough for all data that is sent at once.
    monkeypatch.setattr(http_connection, "REQUEST_SECONDS", 0.5)
    app = App()
    async with serving(app) as address:
        _, idle = await connect(address)
        held, holder = await connect(address, b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n")
        sent, sender = await connect(address, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nfour")
        await app.begun.wait()
        # Long enough for a connection without a request to be closed.
        assert await exchange(address, b"") == b""
        sender.write(b" five")
        app.gate.set()
        await held.readuntil(b"0 bytes")
        await sent.readuntil(b"9 bytes")
        for writer in (idle, holder, sender):
            writer.close()


async def test_the_longest_waiting_connection_gives_way_and_no_request_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MAX_CONNECTIONS", 8)
    app = App()
    async with serving(app) as address:
        before = refused("too_many_connections")
        held, holder = await connect(address, b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await app.begun.wait()
        idle = [await connect(address) for _ in range(20)]
        assert b"0 bytes" in await exchange(address, GET + b"Connection: close\r\n\r\n")
        for reader, _ in idle[:13]:
            assert await rest(reader) == b""
        assert refused("too_many_connections") == before + 14
        app.gate.set()
        await held.readuntil(b"0 bytes")
        assert not any(reader.at_eof() for reader, _ in idle[14:])
        for _, writer in [*idle, (held, holder)]:
            writer.close()


async def test_a_body_that_does_not_come_gives_way_to_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MAX_CONNECTIONS", 8)
    async with serving(App()) as address:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nfour"
        sending = [await connect(address, b"") for _ in range(8)]
        for reader, writer in sending:
            # The second one is asked for when the first has been answered.
            writer.write(head + b" five" + head)
            await reader.readuntil(b"9 bytes")
        assert b"0 bytes" in await exchange(address, GET + b"Connection: close\r\n\r\n")
        assert await rest(sending[0][0]) == b""
        for reader, writer in sending[1:]:
            writer.write(b" five")
            await reader.readuntil(b"9 bytes")
        for _, writer in sending:
            writer.close()


@pytest.mark.parametrize(
    ("request_line", "hosts", "status"),
    [
        (b"GET / HTTP/1.1", [b"localhost"], 200),
        (b"GET / HTTP/1.1", [b"localhost", b"localhost"], 400),
        (b"GET / HTTP/1.1", [b"localhost", b"evil.example"], 400),
        (b"GET / HTTP/1.1", [], 400),
        (b"GET / HTTP/1.0", [], 200),
        (b"GET http://localhost:8000/ HTTP/1.1", [b"LOCALHOST:8000"], 200),
        (b"GET http://evil.example/ HTTP/1.1", [b"localhost"], 400),
        (b"GET http://localhost@evil.example/ HTTP/1.1", [b"localhost"], 400),
        (b"GET http://evil.example/ HTTP/1.0", [], 400),
        (b"OPTIONS * HTTP/1.1", [b"localhost"], 200),
    ],
)
async def test_a_request_names_one_host(address: str, request_line: bytes, hosts: list[bytes], status: int) -> None:
    named = b"".join(b"Host: " + host + b"\r\n" for host in hosts)
    answer = await exchange(address, request_line + b"\r\n" + named + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer


def test_a_process_that_listens_may_open_as_many_files_as_its_hard_limit_says() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource; from protos.rpc.startup import raise_file_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "limit = raise_file_limit(); assert raise_file_limit() == limit\n"
        "print(limit, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert done.stdout.split() == [str(most)] * 2
