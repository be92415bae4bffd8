"""The stream between a router and an engine: how it ends, and what it refuses."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from prometheus_client import CollectorRegistry

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.errors import from_status
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.engine_service import Session
from scheduler.metrics import RequestMetrics
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
        async with asyncio.timeout(20):
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
        (start(max_tokens=0), "max_tokens"),
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
        async with asyncio.timeout(20):
            await call.write(command)
            failure = (await news(call, "failures")).failures[0]
            fields = from_status(status_pb2.Status.FromString(failure.status)).fields
            assert (failure.request_id, list(fields)) == ("a", [field])
            await call.write(start())
            outputs = (await news(call, "outputs")).outputs
            assert outputs[0].usage.prompt_tokens == 2
        call.cancel()


class Gone:
    """The other end of a session, which leaves while it is sent a message."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def peer(self) -> str:
        return "gone"

    async def write(self, _message: pb.StreamRequestsResponse) -> None:
        self.begun.set()
        await asyncio.sleep(0.05)
        raise ConnectionError("the call is over")


async def test_a_router_that_leaves_in_the_middle_of_a_message_is_no_error(tmp_path: Path) -> None:
    async def commands() -> AsyncIterator[pb.StreamRequestsRequest]:
        await asyncio.Event().wait()
        yield CANCEL

    errors: list[dict[str, Any]] = []
    async with run_engine(tmp_path) as engine:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        peer = Gone()
        access_log = AccessLog(RequestMetrics(CollectorRegistry()))
        session = Session(engine.scheduler.requests, access_log, peer)  # type: ignore[arg-type]
        serving = asyncio.create_task(session.run(commands()))
        await peer.begun.wait()
        # The call ends, and then the server stops.
        serving.cancel()
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        await asyncio.sleep(0.1)
        del serving
        gc.collect()
    assert errors == []
