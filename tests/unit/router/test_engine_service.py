"""The stream between a router and an engine: its end, and its refusals."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from structlog.testing import capture_logs

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.errors import from_status
from scheduler.cache.client import CacheClient
from scheduler.errors import DrainingError
from scheduler.frontend.engine_service import PeerRequests
from scheduler.frontend.validation import RequestValidator
from tests.support.patience import patience
from tests.support.scheduler.fleet import run_engine


def start(**fields: object) -> pb.StreamRequestsRequest:
    plain = {"request_id": "a", "token_ids": pb.TokenIds(token_ids=[1, 2]), "max_tokens": 3}
    return pb.StreamRequestsRequest(start=pb.StartRequest(request=pb.StreamGenerateRequest(**plain | fields)))  # type: ignore[arg-type]


CANCEL = pb.StreamRequestsRequest(cancel=pb.CancelRequest(request_id="unknown"))


async def converse(address: str, commands: Sequence[pb.StreamRequestsRequest]) -> grpc.StatusCode:
    """How a stream of these commands ends once the router has sent all of them."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
        call = stub.StreamRequests(iter(commands))
        async with asyncio.timeout(patience(20)):
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            return await call.code()


async def news(call: Any, field: str) -> pb.StreamRequestsResponse:
    """The next message that has any of these."""
    while True:
        message: pb.StreamRequestsResponse = await call.read()
        if getattr(message, field):
            return message


@pytest.mark.parametrize(
    ("commands", "code"),
    [
        ([], grpc.StatusCode.OK),
        ([CANCEL], grpc.StatusCode.OK),
        ([start()], grpc.StatusCode.OK),
        ([pb.StreamRequestsRequest()], grpc.StatusCode.INVALID_ARGUMENT),
        ([start(request_id="")], grpc.StatusCode.INVALID_ARGUMENT),
        ([start(), start()], grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_stream_ends_when_the_router_has_sent_all(
    tmp_path: Path, commands: list[pb.StreamRequestsRequest], code: grpc.StatusCode
) -> None:
    async with run_engine(tmp_path) as engine:
        for _ in range(5):
            assert await converse(engine.address, commands) is code


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (start(n=2), "request.n"),
        (start(stop=["x"]), "request.stop"),
        (start(max_tokens=1 << 20), "max_tokens"),
        (
            pb.StreamRequestsRequest(start=pb.StartRequest(request=start().start.request, output_token_ids=[1, 2, 3])),
            "output_token_ids",
        ),
    ],
)
async def test_a_request_that_is_refused_leaves_the_stream_open(
    tmp_path: Path, command: pb.StreamRequestsRequest, field: str
) -> None:
    async with run_engine(tmp_path) as engine, grpc.aio.insecure_channel(engine.address) as channel:
        stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
        call = stub.StreamRequests()
        async with asyncio.timeout(patience(20)):
            await call.write(command)
            failure = (await news(call, "failures")).failures[0]
            fields = from_status(status_pb2.Status.FromString(failure.status)).fields
            assert (failure.request_id, list(fields)) == ("a", [field])
            await call.write(start())
            outputs = (await news(call, "outputs")).outputs
            assert outputs[0].usage.prompt_tokens == 2
        call.cancel()


async def test_an_unexpected_error_before_a_request_is_taken_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(RequestValidator, "output_of", broken)
    async with run_engine(tmp_path) as engine, grpc.aio.insecure_channel(engine.address) as channel:
        stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
        call = stub.StreamRequests()
        async with asyncio.timeout(patience(20)):
            await call.write(start())
            [failure] = (await news(call, "failures")).failures
        assert from_status(status_pb2.Status.FromString(failure.status)).reason == "UNEXPECTED"
        assert failure.is_refused
        call.cancel()


class Gone:
    """The other end of a session, which leaves while it is sent a message."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def peer(self) -> str:
        return "gone"

    async def write(self, _message: pb.StreamRequestsResponse) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(0.05)
            raise ConnectionError("the call is over")
        finally:
            self.ended.set()


class AtOnce:
    """The other end of a session, which takes every message without a pause, as a pipe does."""

    def __init__(self) -> None:
        self.messages: list[pb.StreamRequestsResponse] = []

    def peer(self) -> str:
        return "at once"

    async def write(self, message: pb.StreamRequestsResponse) -> None:
        self.messages.append(message)
        assert len(self.messages) < 1000, "messages without an end"

    async def until(self, field: str, count: int = 1) -> None:
        """Waits until the messages have N = `count` items in this field in all."""
        async with asyncio.timeout(patience(20)):
            while sum(len(getattr(message, field)) for message in self.messages) < count:
                await asyncio.sleep(0.01)


async def test_requests_that_fail_are_reported_once(tmp_path: Path) -> None:
    async def commands() -> AsyncIterator[pb.StreamRequestsRequest]:
        for name in ("a", "b"):
            yield start(request_id=name, max_tokens=200)
        await asyncio.Event().wait()

    async with run_engine(tmp_path) as engine:
        engine.executor.step_seconds = 0.02
        requests, peer = engine.scheduler.requests, AtOnce()
        serving = asyncio.create_task(PeerRequests(requests, None, peer).run(commands()))
        await peer.until("outputs")
        requests.fail_all(DrainingError("the scheduler is stopping"))
        await peer.until("failures", 2)
        await asyncio.sleep(0.1)  # subject: nothing is reported again meanwhile
        assert sorted(one.request_id for message in peer.messages for one in message.failures) == ["a", "b"]
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_a_router_that_leaves_in_the_middle_of_a_message_is_no_error(tmp_path: Path) -> None:
    async def commands() -> AsyncIterator[pb.StreamRequestsRequest]:
        await asyncio.Event().wait()
        yield CANCEL

    errors: list[dict[str, Any]] = []
    async with run_engine(tmp_path) as engine:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        peer = Gone()
        serving = asyncio.create_task(PeerRequests(engine.scheduler.requests, None, peer).run(commands()))
        await peer.begun.wait()
        # The call ends, and then the server stops.
        serving.cancel()
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        async with asyncio.timeout(patience(5)):
            await peer.ended.wait()
        # The task of the write ends.
        await asyncio.sleep(0)
        del serving
        gc.collect()
    assert errors == []


async def to_the_end(call: Any) -> None:
    """The end of a call comes after all of its messages."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_session_that_can_say_nothing_any_more_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No router can make that happen; a defect can. Its requests would wait there for ever."""

    def fails(self: PeerRequests, message: pb.StreamRequestsResponse) -> None:
        raise ZeroDivisionError

    async with run_engine(tmp_path) as engine, grpc.aio.insecure_channel(engine.address) as channel:
        stub: rpc.EngineServiceAsyncStub = rpc.EngineServiceStub(channel)
        call = stub.StreamRequests()
        await call.write(start(max_tokens=100))
        assert await news(call, "outputs")
        monkeypatch.setattr(PeerRequests, "_add_loads", fails)
        with capture_logs() as logs:
            async with asyncio.timeout(patience(20)):
                with pytest.raises(grpc.aio.AioRpcError):
                    await to_the_end(call)
        assert [line["event"] for line in logs if line["log_level"] == "error"] == ["a session with a router failed"]
        monkeypatch.undo()
        await engine.manager.unused()


async def test_a_scheduler_whose_watching_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_engine(tmp_path) as engine:
        monkeypatch.setattr(CacheClient, "silence", None)
        async with asyncio.timeout(patience(20)):
            await engine.scheduler.failed.wait()
