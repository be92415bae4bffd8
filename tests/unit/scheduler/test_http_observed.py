"""What operators see of callers by HTTP: every answer is counted, and has a line in the access log."""

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.guard import Guard
from protos.rpc.identity import Role
from protos.rpc.server import Server
from scheduler.app import Scheduler
from scheduler.settings import SchedulerSettings
from tests.support.generation import greedy_request as request
from tests.support.keyring import Keyring
from tests.support.scheduler.http import JSON, LEAST, ask, first_event, serve, starting_service
from tests.support.scheduler.stack import StackFactory

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PEER = r"127\.0\.0\.1:\d+"


def answered(route: str, code: int) -> float:
    """How many requests had this answer."""
    return REGISTRY.get_sample_value("kvkeep_http_requests_total", {"route": route, "code": str(code)}) or 0


async def one_more(route: str, code: int, before: float) -> None:
    """Waits until one more is counted, which comes after its last byte."""
    async with asyncio.timeout(20):
        while (now := answered(route, code)) == before:
            await asyncio.sleep(0.01)
    assert now == before + 1


@pytest.mark.parametrize(
    ("method", "path", "body", "route", "code"),
    [
        ("POST", COMPLETIONS, json.dumps(LEAST), COMPLETIONS, 200),
        ("POST", COMPLETIONS, json.dumps(LEAST | {"cache_slat": "x"}), COMPLETIONS, 400),
        ("POST", COMPLETIONS, json.dumps(LEAST | {"model": "x"}), COMPLETIONS, 404),
        ("POST", COMPLETIONS, " " * 70_000, COMPLETIONS, 413),
        ("PUT", COMPLETIONS, "{}", COMPLETIONS, 405),
        ("POST", "/tokenize", '{"prompt": 1}', "/tokenize", 400),
        ("GET", "/v1/models/fake", None, "/v1/models/{model}", 200),
        ("GET", "/v1/models/some/other", None, "/v1/models/{model}", 404),
        ("GET", "/some/where", None, "other", 404),
        ("GET", "/health", None, "/health", 200),
    ],
)
async def test_every_answer_is_counted_by_route_and_status(
    run_stack: StackFactory, method: str, path: str, body: str | None, route: str, code: int
) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service) as address:
        before = answered(route, code)
        assert (await ask(address, method, path, body)).status == code
        await one_more(route, code, before)
    assert REGISTRY.get_sample_value("kvkeep_http_seconds_count", {"route": route})
    assert REGISTRY.get_sample_value("kvkeep_http_in_flight") == 0


async def test_a_scheduler_that_is_not_ready_is_seen() -> None:
    before = answered(COMPLETIONS, 503)
    async with serve(starting_service()) as address:
        assert (await ask(address, "POST", COMPLETIONS, json.dumps(LEAST))).status == 503
        await one_more(COMPLETIONS, 503, before)


async def test_a_defect_is_seen_and_its_answer_has_a_name() -> None:
    before = answered("/metrics", 500)
    async with serve(starting_service(), registry=None) as address:
        answer = await ask(address, "GET", "/metrics", headers={"X-Request-Id": "mine"})
        await one_more("/metrics", 500, before)
    assert (answer.status, answer.headers["x-request-id"]) == (500, "mine")


async def test_a_stream_that_fails_is_counted_as_what_it_failed_of(run_stack: StackFactory) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service) as address:
        before = answered(COMPLETIONS, 503), answered(COMPLETIONS, 200)
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*address.split(":"))
        with contextlib.closing(writer):
            await first_event(reader, writer)
            await stack.scheduler.requests.drain(0)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        await one_more(COMPLETIONS, 503, before[0])
        assert answered(COMPLETIONS, 200) == before[1]


async def test_a_caller_that_leaves_is_no_success(run_stack: StackFactory) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service) as address:
        before = answered(COMPLETIONS, 499)
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await first_event(reader, writer)
        writer.transport.abort()
        await one_more(COMPLETIONS, 499, before)


def lines_in(file: Path) -> list[dict[str, Any]]:
    """All of the access log."""
    return [json.loads(line) for line in file.read_text().splitlines()]


async def line_in(file: Path, number: int = 0) -> dict[str, Any]:
    """Its last line when it has so many before: a thread writes it."""
    async with asyncio.timeout(20):
        while len(lines := lines_in(file)) <= number:
            await asyncio.sleep(0.01)
    assert len(lines) == number + 1
    return lines[number]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prefix"), [(COMPLETIONS, "cmpl-"), (CHAT, "chatcmpl-")])
async def test_the_answers_id_is_that_of_the_line(
    run_stack: StackFactory, tmp_path: Path, path: str, prefix: str, stream: bool
) -> None:
    file = tmp_path / "access"
    asked = LEAST | {"stream": stream}
    if path == CHAT:
        asked |= {"messages": [{"role": "user", "content": asked.pop("prompt")}]}
    async with run_stack(access_log=file) as stack, serve(stack.scheduler.service) as address:
        answer = await ask(address, "POST", path, json.dumps(asked))
        [told] = set(re.findall(r'"id": ?"([^"]+)"', answer.body))
        line = await line_in(file)
        assert told.startswith(prefix)
        assert told == line["generation"] == f"{prefix}{answer.headers['x-request-id']}"
        assert line["request_id"] == answer.headers["x-request-id"]
        assert (line["method"], line["route"], line["status"]) == (f"POST {path}", path, 200)
        assert (line["finish_reason"], line["event"]) == ("length", "request ended")
        assert re.fullmatch(PEER, line["peer"])
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
        # One that the caller names keeps its name, also where the header is used again.
        for number, name in enumerate(("", "mine"), 1):
            named = await ask(
                address, "POST", path, json.dumps(asked | {"request_id": name}), JSON | {"X-Request-Id": "again"}
            )
            [told] = set(re.findall(r'"id": ?"([^"]+)"', named.body))
            line = await line_in(file, number)
            assert (line["request_id"], line["generation"]) == ("again", told)
            assert told == "mine" if name else re.fullmatch(f"{prefix}[0-9a-f]{{16}}", told)


@pytest.mark.parametrize(
    ("path", "body", "status", "error", "counts"),
    [
        (COMPLETIONS, LEAST | {"model": "another"}, 404, "MODEL_NOT_FOUND", True),
        (COMPLETIONS, LEAST | {"cache_slat": "a secret"}, 400, "INVALID_FIELD", True),
        (COMPLETIONS, LEAST | {"suffix": "a secret"}, 400, "INVALID_FIELD", True),
        (COMPLETIONS, LEAST | {"prompt": ["a secret", 5]}, 400, "INVALID_FIELD", True),
        (COMPLETIONS, LEAST | {"temperature": -1}, 400, "INVALID_FIELD", True),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "INVALID_FIELD", True),
        (COMPLETIONS, {"prompt": "a secret" * 20_000}, 413, "REQUEST_ENTITY_TOO_LARGE", True),
        ("/tokenize", {"prompt": 1}, 400, "INVALID_FIELD", False),
        ("/tokenize", {"prompt": "a secret"}, 200, None, False),
        ("/detokenize", {"tokens": [1, 2]}, 200, None, False),
        ("/no/such%0Apath", {}, 404, "NOT_FOUND", False),
    ],
)
async def test_every_request_has_a_line(
    run_stack: StackFactory, tmp_path: Path, path: str, body: dict[str, Any], status: int, error: str, counts: bool
) -> None:
    file = tmp_path / "access"
    async with run_stack(access_log=file) as stack, serve(stack.scheduler.service) as address:
        for quiet in ("/health", "/metrics", "/version"):
            await ask(address, "GET", quiet)
        answer = await ask(address, "POST", path, json.dumps(body))
        line = await line_in(file)
        assert (answer.status, line["status"], line.get("error")) == (status, status, error)
        assert line["event"] == ("request refused" if error else "request ended")
        assert (line["method"], line["route"]) == (f"POST {path}", "other" if "no" in path else path)
        assert line["request_id"] == answer.headers["x-request-id"]
        assert re.fullmatch(PEER, line["peer"])
        assert line["seconds"] >= 0
        assert "secret" not in file.read_text()
        refused = stack.registry.get_sample_value("kvkeep_scheduler_refused_requests_total", {"reason": error or ""})
        assert refused == (1 if counts else None)


async def test_a_line_says_whose_token_it_was(run_stack: StackFactory, tmp_path: Path) -> None:
    keyring, file = Keyring(tmp_path), tmp_path / "access"
    keyring.add(Role.CALLER, "acme")
    keyring.add(Role.VIEWER)
    guard = Guard(keyring.file, None)
    caller, viewer = keyring.tokens.items()
    async with run_stack(access_log=file) as stack, serve(stack.scheduler.service, guard=guard) as address:
        for number, (name, token, tenant, status) in enumerate(
            [(*caller, "acme", 200), (*viewer, "", 403), ("", "stranger", "", 401)]
        ):
            headers = JSON | {"Authorization": f"Bearer {token}"}
            assert (await ask(address, "POST", COMPLETIONS, json.dumps(LEAST), headers)).status == status
            line = await line_in(file, number)
            assert (line["who"], line["tenant"], line["status"]) == (name, tenant, status)
            assert token not in file.read_text()


async def test_a_caller_that_leaves_has_a_line(run_stack: StackFactory, tmp_path: Path) -> None:
    file = tmp_path / "access"
    async with run_stack(access_log=file) as stack, serve(stack.scheduler.service) as address:
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await first_event(reader, writer)
        writer.transport.abort()
        line = await line_in(file)
        assert (line["status"], line["finish_reason"], line["error"]) == (499, "abort", "CANCELLED")


async def test_before_the_stack_is_there_refusals_have_lines_and_count(tmp_path: Path) -> None:
    file, registry, address = tmp_path / "access", CollectorRegistry(), f"unix:{tmp_path}/scheduler"
    settings = SchedulerSettings(scheduler_address=address, access_log=file)
    async with contextlib.AsyncExitStack() as exits:
        server = Server("scheduler", drain_seconds=0)
        scheduler = Scheduler(settings, server, registry)
        exits.push_async_callback(scheduler.stop)
        server.listen(address, {"generation.v1.GenerationService": scheduler.service.add_to})
        await server.start()
        exits.push_async_callback(server.stop)
        http = await exits.enter_async_context(serve(scheduler.service))
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        assert (await ask(http, "POST", COMPLETIONS, json.dumps(LEAST))).status == 503
        assert (await line_in(file))["error"] == "NOT_READY"
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.StreamGenerate(request([1], 1), timeout=20).read()
        line = await line_in(file, 1)
        assert (line["error"], line["event"], line["method"]) == (
            "NOT_READY", "request refused", "generation.v1.GenerationService/StreamGenerate",
        )  # fmt: skip
        assert line["peer"].startswith("unix:")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.TokenizePrompt(pb.TokenizePromptRequest(text="x"), timeout=20)
        assert (await line_in(file, 2))["method"] == "generation.v1.GenerationService/TokenizePrompt"
        assert registry.get_sample_value("kvkeep_scheduler_refused_requests_total", {"reason": "NOT_READY"}) == 2
