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
from tests.support.patience import patience
from tests.support.scheduler.http import JSON, LEAST, ask, first_event, serve, starting_service
from tests.support.scheduler.stack import Stack, StackFactory

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PEER = r"127\.0\.0\.1:\d+"


def answered(route: str, code: int) -> float:
    """How many requests had this answer."""
    return REGISTRY.get_sample_value("kvkeep_http_requests_total", {"route": route, "code": str(code)}) or 0


async def one_more(route: str, code: int, before: float) -> None:
    """Waits until one more is counted, which comes after its last byte."""
    async with asyncio.timeout(patience(20)):
        while (now := answered(route, code)) == before:
            await asyncio.sleep(0.01)
    assert now == before + 1


def lines_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def lines_until(file: Path, count: int) -> list[dict[str, Any]]:
    """The access log when it has N = `count` lines, and no more: a thread writes it."""
    async with asyncio.timeout(patience(20)):
        while len(lines := lines_in(file)) < count:
            await asyncio.sleep(0.01)
    assert len(lines) == count
    return lines


async def line_in(file: Path, number: int = 0) -> dict[str, Any]:
    """The log's last line when N = `number` lines precede it."""
    return (await lines_until(file, number + 1))[number]


CASES: list[tuple[str, str, object, str, int, str | None]] = [
    # Method, path, body, route, status, reason.
    ("POST", COMPLETIONS, LEAST, COMPLETIONS, 200, None),
    ("POST", COMPLETIONS, LEAST | {"model": "another"}, COMPLETIONS, 404, "MODEL_NOT_FOUND"),
    ("POST", COMPLETIONS, LEAST | {"cache_slat": "a secret"}, COMPLETIONS, 400, "INVALID_FIELD"),
    ("POST", COMPLETIONS, LEAST | {"suffix": "a secret"}, COMPLETIONS, 400, "INVALID_FIELD"),
    ("POST", COMPLETIONS, LEAST | {"prompt": ["a secret", 5]}, COMPLETIONS, 400, "INVALID_FIELD"),
    ("POST", COMPLETIONS, LEAST | {"temperature": -1}, COMPLETIONS, 400, "INVALID_FIELD"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": None}]}, CHAT, 400, "INVALID_FIELD"),
    ("POST", COMPLETIONS, {"prompt": "a secret" * 20_000}, COMPLETIONS, 413, "REQUEST_ENTITY_TOO_LARGE"),
    ("PUT", COMPLETIONS, {}, COMPLETIONS, 405, "METHOD_NOT_ALLOWED"),
    ("POST", "/tokenize", {"prompt": 1}, "/tokenize", 400, "INVALID_FIELD"),
    ("POST", "/tokenize", {"prompt": "a secret"}, "/tokenize", 200, None),
    ("POST", "/detokenize", {"tokens": [1, 2]}, "/detokenize", 200, None),
    ("GET", "/v1/models/fake", None, "/v1/models/{model}", 200, None),
    ("GET", "/v1/models/some/other", None, "/v1/models/{model}", 404, "MODEL_NOT_FOUND"),
    ("POST", "/no/such%0Apath", {}, "other", 404, "NOT_FOUND"),
]


@pytest.mark.parametrize(("method", "path", "body", "route", "status", "error"), CASES)
async def test_every_answer_is_counted_and_has_a_line(
    run_stack: StackFactory,
    tmp_path: Path,
    method: str,
    path: str,
    body: object,
    route: str,
    status: int,
    error: str | None,
) -> None:
    file = tmp_path / "access"
    before, probes = answered(route, status), answered("/health", 200)
    async with run_stack(access_log=file) as stack, serve(stack.scheduler.service) as address:
        for quiet in ("/health", "/metrics", "/version"):
            await ask(address, "GET", quiet)
        answer = await ask(address, method, path, None if body is None else json.dumps(body))
        line = await line_in(file)
        assert (answer.status, line["status"], line.get("error")) == (status, status, error)
        assert line["event"] == ("request refused" if error else "request ended")
        assert (line["method"], line["route"]) == (f"{method} {path}", route)
        assert line["request_id"] == answer.headers["x-request-id"]
        assert re.fullmatch(PEER, line["peer"])
        assert line["seconds"] >= 0
        assert "secret" not in file.read_text()
        refused = stack.registry.get_sample_value("kvkeep_scheduler_refused_requests_total", {"reason": error or ""})
        assert refused == (1 if error and route in (COMPLETIONS, CHAT) else None)
        await one_more(route, status, before)
    assert answered("/health", 200) == probes + 1
    assert REGISTRY.get_sample_value("kvkeep_http_seconds_count", {"route": route})
    async with asyncio.timeout(patience(20)):
        # A request of another test may still be ending.
        while REGISTRY.get_sample_value("kvkeep_http_in_flight"):
            await asyncio.sleep(0.01)


async def test_a_defect_is_counted_and_its_answer_does_not_explain_it(caplog: pytest.LogCaptureFixture) -> None:
    before = answered("/metrics", 500)
    async with serve(starting_service(), registry=None) as address:
        answer = await ask(address, "GET", "/metrics", headers={"X-Request-Id": "mine"})
        await one_more("/metrics", 500, before)
        random = await ask(address, "GET", "/nowhere", headers={"X-Request-Id": "a\tb"})
        assert re.fullmatch("[0-9a-f]{16}", random.headers["x-request-id"])
    assert (answer.status, answer.headers["x-request-id"]) == (500, "mine")
    said = "internal error of the server: see the log of the server"
    assert answer.error == {"message": said, "type": "server_error", "param": None, "code": "unexpected"}
    assert "AttributeError" in caplog.text


async def test_an_error_in_a_stream_is_its_last_event_and_counts_as_the_answer(stack: Stack, address: str) -> None:
    before = answered(COMPLETIONS, 503), answered(COMPLETIONS, 200)
    stack.executor.step_seconds = 0.02
    reader, writer = await asyncio.open_connection(*address.split(":"))
    with contextlib.closing(writer):
        await first_event(reader, writer)
        draining = asyncio.create_task(stack.scheduler.requests.drain(0.1))
        assert (await ask(address, "POST", COMPLETIONS, json.dumps(LEAST))).error["code"] == "draining"
        assert (await ask(address, "GET", "/health")).status == 503
        events = (await reader.readuntil(b"\r\n0\r\n\r\n")).decode()
        await draining
    assert '"code":"draining"' in events.strip().split("data: ")[-1]
    assert "[DONE]" not in events
    # The request that was refused meanwhile, and the stream.
    await one_more(COMPLETIONS, 503, before[0] + 1)
    assert answered(COMPLETIONS, 200) == before[1]


async def test_a_caller_that_leaves_ends_its_request_which_is_no_success(
    run_stack: StackFactory, tmp_path: Path
) -> None:
    file, before = tmp_path / "access", answered(COMPLETIONS, 499)
    async with run_stack(access_log=file) as stack, serve(stack.scheduler.service) as address:
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await first_event(reader, writer)
        writer.transport.abort()
        await one_more(COMPLETIONS, 499, before)
        line = await line_in(file)
        assert (line["status"], line["finish_reason"], line["error"]) == (499, "abort", "CANCELLED")
        await stack.manager.released()
        assert stack.metric("output_tokens_total") < 200


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
        [answered_id] = set(re.findall(r'"id": ?"([^"]+)"', answer.body))
        line = await line_in(file)
        assert answered_id.startswith(prefix)
        assert answered_id == line["generation"] == f"{prefix}{answer.headers['x-request-id']}"
        assert line["request_id"] == answer.headers["x-request-id"]
        assert (line["method"], line["route"], line["status"]) == (f"POST {path}", path, 200)
        assert (line["finish_reason"], line["event"]) == ("length", "request ended")
        assert re.fullmatch(PEER, line["peer"])
        assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"]
        # One that the caller names keeps its name, also where the header is used again.
        for number, name in enumerate(("", "mine"), 1):
            named = await ask(
                address, "POST", path, json.dumps(asked | {"request_id": name}), JSON | {"X-Request-Id": "again"}
            )
            [answered_id] = set(re.findall(r'"id": ?"([^"]+)"', named.body))
            line = await line_in(file, number)
            assert (line["request_id"], line["generation"]) == ("again", answered_id)
            assert answered_id == "mine" if name else re.fullmatch(f"{prefix}[0-9a-f]{{16}}", answered_id)


async def test_a_line_names_the_caller(run_stack: StackFactory, keyring: Keyring, tmp_path: Path) -> None:
    file = tmp_path / "access"
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
            assert (line["caller"], line["tenant"], line["status"]) == (name, tenant, status)
            assert token not in file.read_text()


async def test_before_the_stack_is_there_refusals_have_lines_and_count(tmp_path: Path) -> None:
    file, registry, address = tmp_path / "access", CollectorRegistry(), f"unix:{tmp_path}/scheduler"
    settings = SchedulerSettings(scheduler_address=address, access_log=file)
    async with contextlib.AsyncExitStack() as exits:
        server = Server("scheduler", drain_seconds=0)
        scheduler = Scheduler(settings, server, registry)
        exits.push_async_callback(scheduler.stop)
        server.listen(address, scheduler.services)
        await server.start()
        exits.push_async_callback(server.stop)
        http = await exits.enter_async_context(serve(scheduler.service))
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        for path, body in (
            ("/health", None),
            ("/v1/models", None),
            ("/tokenize", {"prompt": "x"}),
            (COMPLETIONS, LEAST),
        ):
            answer = await ask(http, "POST" if body else "GET", path, json.dumps(body))
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert (answer.error["code"], answer.error["type"]) == ("not_ready", "server_error")
        assert (await ask(http, "GET", "/version")).status == 200
        assert {line["error"] for line in await lines_until(file, 3)} == {"NOT_READY"}
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.StreamGenerate(request([1], 1), timeout=patience(20)).read()
        line = await line_in(file, 3)
        assert (line["error"], line["event"], line["method"]) == (
            "NOT_READY", "request refused", "generation.v1.GenerationService/StreamGenerate",
        )  # fmt: skip
        assert line["peer"].startswith("unix:")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.TokenizePrompt(pb.TokenizePromptRequest(text="x"), timeout=patience(20))
        assert (await line_in(file, 4))["method"] == "generation.v1.GenerationService/TokenizePrompt"
        assert registry.get_sample_value("kvkeep_scheduler_refused_requests_total", {"reason": "NOT_READY"}) == 2
