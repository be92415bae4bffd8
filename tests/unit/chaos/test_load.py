"""Clients notice wrong output, failures, and calls that hang; and they ask again only when they may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.errors import ServiceError
from protos.rpc.server import Server
from tests.chaos import load
from tests.chaos.load import Load
from tests.chaos.report import streams
from tests.chaos.requests import Known, Sample
from tests.support.patience import patience

SERVICE = "generation.v1.GenerationService"
TOKENS = [7, 8, 9]
TEXT = "abc"


class BusyError(ServiceError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class LostError(ServiceError):
    code = grpc.StatusCode.INTERNAL
    reason = "UNEXPECTED"


class Scheduler(rpc.GenerationServiceServicer):
    """Answers as a function says: the attempts' number in, pieces or an error out."""

    def __init__(self, answer: Callable[[int, Any], AsyncIterator[pb.StreamGenerateResponse]]) -> None:
        self._answer = answer
        self.calls = 0
        self.ids: list[str] = []

    async def StreamGenerate(  # type: ignore[override]
        self, request: pb.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        self.calls += 1
        self.ids.append(request.request_id)
        async for piece in self._answer(self.calls, context):
            yield piece


def piece(place: int, token: int | None = None, **fields: Any) -> pb.StreamGenerateResponse:
    """One token of the known output; the last one ends it."""
    finish = pb.FINISH_REASON_LENGTH if place == len(TOKENS) - 1 else pb.FINISH_REASON_UNSPECIFIED
    token_id = TOKENS[place] if token is None else token
    return pb.StreamGenerateResponse(token_ids=[token_id], text=TEXT[place], finish_reason=finish, **fields)


async def right(_number: int, _context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
    for place in range(len(TOKENS)):
        yield piece(place)


async def run(
    folder: Path,
    answer: Callable[[int, Any], AsyncIterator[pb.StreamGenerateResponse]],
    *,
    away: bool = False,
    calls: int = 3,
) -> tuple[Load, Scheduler]:
    """Runs one client until it has made this number of calls."""
    server, scheduler = Server("test", drain_seconds=0), Scheduler(answer)
    server.listen(f"unix:{folder}/s", {SERVICE: lambda s: rpc.add_GenerationServiceServicer_to_server(scheduler, s)})
    await server.start()
    known = Known("known", pb.StreamGenerateRequest(text="x"), (Sample(TOKENS, TEXT, pb.FINISH_REASON_LENGTH),))
    clients = Load([f"unix:{folder}/s"], [known], 1, 1, lambda _server, _begin, _end: away)
    clients.start()
    async with asyncio.timeout(patience(60)):
        while scheduler.calls < calls:
            await asyncio.sleep(0.01)
    await clients.stop()
    await server.stop()
    return clients, scheduler


@pytest.fixture(autouse=True)
def _no_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CANCELLED_SHARE", 0.0)


async def test_the_known_output_is_exact(tmp_path: Path) -> None:
    clients, scheduler = await run(tmp_path, right)
    assert clients.tally.endings == {"exact": scheduler.calls}
    assert clients.tally.faults == []
    assert len(set(scheduler.ids)) == scheduler.calls


@pytest.mark.parametrize("cancelled", [0.0, 1.0])
async def test_one_other_token_is_a_fault_however_the_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: float
) -> None:
    monkeypatch.setattr(load, "CANCELLED_SHARE", cancelled)

    async def wrong(_number: int, _context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
        yield piece(0, token=6)
        yield piece(1)
        yield piece(2)

    clients, _ = await run(tmp_path, wrong)
    assert clients.tally.faults
    assert all("0 tokens are the same" in fault for fault in clients.tally.faults)


async def test_a_status_while_the_scheduler_lives_is_a_fault_and_not_asked_again(tmp_path: Path) -> None:
    async def fail(number: int, context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
        yield piece(0)
        if number % 2:
            raise LostError("lost")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")

    clients, scheduler = await run(tmp_path, fail)
    assert clients.tally.endings == {"failed": scheduler.calls}
    assert len(clients.tally.faults) == scheduler.calls


async def test_requests_lost_with_the_scheduler_or_never_admitted_are_retried(tmp_path: Path) -> None:
    async def at_last(number: int, context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
        if number == 1:
            raise BusyError("full")
        yield piece(0)
        if number == 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield piece(1)
        yield piece(2)

    clients, scheduler = await run(tmp_path, at_last, away=True)
    assert clients.tally.endings == {"queue full": 1, "server died": 1, "exact": scheduler.calls - 2}
    assert clients.tally.faults == []
    assert scheduler.ids[:3] == ["client-0-1.1", "client-0-1.2", "client-0-1.3"]


async def test_a_request_that_is_refused_until_its_client_gives_up_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "REQUEST_SECONDS", 2.0)

    async def refuse(_number: int, _context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
        raise BusyError("full")
        yield

    clients, scheduler = await run(tmp_path, refuse)
    assert clients.tally.endings == {"queue full": scheduler.calls, "starved": 1}
    [fault] = clients.tally.faults
    assert "queue full" in fault
    assert clients.tally.requests == 1
    ended = streams(clients.tally, continued=0)
    assert (ended["starved"], ended["lost"], ended["refused and sent again"]) == (1, 0, scheduler.calls)


async def test_a_request_that_hangs_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "REQUEST_SECONDS", 0.5)

    async def hang(_number: int, _context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
        yield piece(0)
        await asyncio.sleep(30)

    clients, _ = await run(tmp_path, hang, away=True, calls=1)
    assert "DEADLINE_EXCEEDED" in clients.tally.faults[0]


async def test_callers_go_over_to_another_server_when_theirs_does_not_answer(tmp_path: Path) -> None:
    async def gone(_number: int, context: Any) -> AsyncIterator[pb.StreamGenerateResponse]:
        yield piece(0)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    servers = []
    schedulers = [Scheduler(gone), Scheduler(right)]
    for name, one in zip("ab", schedulers, strict=True):
        server = Server("test", drain_seconds=0)
        server.listen(
            f"unix:{tmp_path}/{name}",
            {SERVICE: lambda s, one=one: rpc.add_GenerationServiceServicer_to_server(one, s)},
        )
        await server.start()
        servers.append(server)
    known = Known("known", pb.StreamGenerateRequest(text="x"), (Sample(TOKENS, TEXT, pb.FINISH_REASON_LENGTH),))
    clients = Load([f"unix:{tmp_path}/{name}" for name in "ab"], [known], 1, 1, lambda server, _b, _e: server == 0)
    clients.start()
    async with asyncio.timeout(patience(60)):
        while not schedulers[1].calls:
            await asyncio.sleep(0.01)
    await clients.stop()
    for server in servers:
        await server.stop()
    count = schedulers[1].calls
    assert count > 0
    assert clients.tally.endings == {"server died": count, "exact": count}
    assert clients.tally.faults == []
