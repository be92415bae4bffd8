"""A live request ends by its id, with what there is of its output, wherever it runs; one of another tenant does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.guard import Guard
from protos.rpc.identity import Role
from tests.support.generation import generate_samples
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.http import LEAST, Answer, ask, serve
from tests.support.scheduler.process import scheduler
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, refusal, waiting

LONG = LEAST | {"max_tokens": 300, "ignore_eos": True}


def long(name: str, **fields: Any) -> pb.StreamGenerateRequest:
    token_ids = pb.TokenIds(token_ids=prompt_of(9))
    return pb.StreamGenerateRequest(request_id=name, token_ids=token_ids, max_tokens=300, ignore_eos=True, **fields)


@contextlib.asynccontextmanager
async def admin_of(address: str) -> AsyncIterator[rpc.SchedulerAdminServiceAsyncStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield rpc.SchedulerAdminServiceStub(channel)


async def abort(address: str, body: dict[str, Any], path: str = "/abort_request", token: str = "") -> Answer:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    return await ask(address, "POST", path, json.dumps(body), headers)


async def test_a_running_request_ends_with_what_there_is_of_it(stack: Stack) -> None:
    stack.executor.step_seconds = 0.01
    begun = asyncio.Event()
    running = asyncio.create_task(generate_samples(stack.stub, long("mine", n=3), patience(30), begun))
    await begun.wait()
    await stack.manager.admitted(3)
    await stack.stub.AbortRequest(pb.AbortRequestRequest(request_id="mine"))
    outputs = await running
    assert {output.finish_reason for output in outputs} == {pb.FINISH_REASON_ABORT}
    for output in outputs:
        assert output.usage.output_tokens == len(output.token_ids) < 300
        assert output.token_ids == stack.executor.expected(prompt_of(9), 300)[: len(output.token_ids)]
    assert sum(output.usage.prompt_tokens for output in outputs) == 9
    assert stack.metric("requests_total", finish_reason="abort") == 1
    error = await refusal(stack.stub.AbortRequest(pb.AbortRequestRequest(request_id="mine")))
    assert (error.code, error.reason, list(error.fields)) == (
        grpc.StatusCode.NOT_FOUND,
        "UNKNOWN_REQUEST",
        ["request_id"],
    )


async def test_text_that_was_held_back_comes_with_the_end(stack: Stack) -> None:
    stack.executor.step_seconds = 0.01
    call = stack.stub.StreamGenerate(long("held", stop=["\N{SNOWMAN}"]), timeout=patience(30))
    chunks: list[Any] = [await call.read()]
    await stack.stub.AbortRequest(pb.AbortRequestRequest(request_id="held"))
    while isinstance(chunk := await call.read(), pb.StreamGenerateResponse):
        chunks.append(chunk)
    assert chunks[-1].finish_reason == pb.FINISH_REASON_ABORT
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert "".join(chunk.text for chunk in chunks) == stack.executor.tokenizer.decode(ids)


async def test_a_request_whose_caller_reads_nothing_is_freed_at_once(stack: Stack) -> None:
    # The output would last three times as long as this test waits for its blocks.
    stack.executor.step_seconds = patience(5) / 100
    begun = asyncio.Event()

    async def write(_chunk: pb.StreamGenerateResponse) -> None:
        begun.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(stack.scheduler.service.generate(long("stuck"), write))
    await begun.wait()
    await stack.stub.AbortRequest(pb.AbortRequestRequest(request_id="stuck"))
    async with asyncio.timeout(patience(5)):
        await stack.manager.released()
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})


async def test_a_waiting_request_ends_without_a_token(run_stack: StackFactory) -> None:
    async with run_stack(max_running=1) as stack:
        stack.executor.step_seconds = 0.01
        begun = asyncio.Event()
        first = asyncio.create_task(generate_samples(stack.stub, long("first"), patience(30), begun))
        await begun.wait()
        second = asyncio.create_task(generate_samples(stack.stub, long("second", n=2), patience(30)))
        await waiting(stack, 2)
        async with admin_of(stack.address) as admin:
            counted = await admin.AbortRequests(pb.AbortRequestsRequest(all=True, validate_only=True))
            assert counted.aborted_requests == 2
            ended = await admin.AbortRequests(pb.AbortRequestsRequest(request_id="second"))
            assert ended.aborted_requests == 1
            for output in await second:
                assert (output.finish_reason, output.token_ids) == (pb.FINISH_REASON_ABORT, [])
            assert not first.done()
            assert (await admin.AbortRequests(pb.AbortRequestsRequest(all=True))).aborted_requests == 1
            assert (await first)[0].finish_reason == pb.FINISH_REASON_ABORT
            assert (await admin.AbortRequests(pb.AbortRequestsRequest(all=True))).aborted_requests == 0


@pytest.mark.parametrize("message", [pb.AbortRequestsRequest(), pb.AbortRequestsRequest(request_id="x", all=True)])
async def test_an_operator_names_a_request_or_all(stack: Stack, message: pb.AbortRequestsRequest) -> None:
    async with admin_of(stack.address) as admin:
        error = await refusal(admin.AbortRequests(message))
        assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_id"])
    error = await refusal(stack.stub.AbortRequest(pb.AbortRequestRequest()))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_id"])


async def test_equal_ids_of_two_tenants_are_two_requests(stack: Stack) -> None:
    stack.executor.step_seconds = 0.01
    tasks = {}
    for tenant in ("a", "b"):
        begun = asyncio.Event()
        request = long("same", cache=pb.CacheOptions(tenant_id=tenant))
        tasks[tenant] = asyncio.create_task(generate_samples(stack.stub, request, patience(30), begun))
        await begun.wait()
    await refusal(stack.stub.AbortRequest(pb.AbortRequestRequest(request_id="same")))
    await stack.stub.AbortRequest(pb.AbortRequestRequest(request_id="same", tenant_id="b"))
    assert (await tasks["b"])[0].finish_reason == pb.FINISH_REASON_ABORT
    assert not tasks["a"].done()
    async with admin_of(stack.address) as admin:
        assert (await admin.AbortRequests(pb.AbortRequestsRequest(request_id="same"))).aborted_requests == 1
    await tasks["a"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "body"),
    [
        ("/abort_request", {"rid": "mine"}, {"rid": "mine", "abort_all": False}),
        ("/abort_requests", {"request_id": "mine"}, {"request_ids": ["other", "mine"]}),
        ("/abort_request", {}, {"abort_all": True}),
    ],
)
async def test_an_answer_over_http_ends_with_the_reason_and_a_usage(
    stack: Stack, address: str, path: str, fields: dict[str, Any], body: dict[str, Any], stream: bool
) -> None:
    stack.executor.step_seconds = 0.01
    asked = LONG | fields | {"prompt": [prompt_of(5), prompt_of(7)], "stream": stream, "return_token_ids": True}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    call = asyncio.create_task(ask(address, "POST", "/v1/completions", json.dumps(asked)))
    await stack.manager.admitted(2)
    answer = await abort(address, body, path)
    assert (answer.status, json.loads(answer.body)) == (200, {"aborted_requests": 1})
    whole = await call
    assert whole.status == 200
    lines = [line.removeprefix("data: ") for line in whole.body.splitlines() if line] if stream else [whole.body]
    if stream:
        assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    reasons = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert sorted(reasons) == [(0, "abort"), (1, "abort")]
    tokens = sum(len(choice["token_ids"]) for choice in choices)
    assert events[-1]["usage"]["completion_tokens"] == tokens < 600
    assert events[-1]["usage"]["prompt_tokens"] == 12


async def test_a_caller_without_a_request_id_aborts_by_the_header_of_its_call(stack: Stack, address: str) -> None:
    stack.executor.step_seconds = 0.01
    headers = {"Content-Type": "application/json", "X-Request-Id": "trace"}
    calls = [asyncio.create_task(ask(address, "POST", "/v1/completions", json.dumps(LONG), headers)) for _ in range(2)]
    await stack.manager.admitted(2)
    answer = await abort(address, {"rid": "trace"})
    assert json.loads(answer.body) == {"aborted_requests": 2}
    for call in calls:
        assert json.loads((await call).body)["choices"][0]["finish_reason"] == "abort"
    assert stack.metric("requests_total", finish_reason="abort") == 2
    assert (await abort(address, {"rid": "trace"})).status == 404


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "rid", "must be given, and only one of them"),
        ({"rid": ""}, 400, "rid", "must be given"),
        ({"rid": "x", "abort_all": True}, 400, "rid", "only one of them"),
        ({"rid": "x", "request_ids": ["y"]}, 400, "rid", "only one of them"),
        ({"rid": 5}, 400, "rid", "must be a valid string"),
        ({"request_ids": "x"}, 400, "request_ids", "must be a valid list"),
        ({"request_ids": ["x"] * 1025}, 400, "request_ids", "at most 1024"),
        ({"abort_all": "yes"}, 400, "abort_all", "must be a valid boolean"),
        ({"ridd": "x"}, 400, "ridd", "did you mean rid?"),
        ({"rid": "x"}, 404, "rid", "no live request has this id"),
        ({"request_ids": ["x", "y"]}, 404, "request_ids", "no live request has this id"),
    ],
)
async def test_a_wrong_request_is_refused_by_its_field(
    address: str, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    for path in ("/abort_request", "/abort_requests"):
        answer = await abort(address, body, path)
        assert (answer.status, answer.error["param"]) == (status, param)
        assert words in answer.error["message"]


async def test_a_tenant_ends_its_own_requests_and_an_operator_any(
    stack: Stack, keyring: Keyring, tmp_path: Path
) -> None:
    for role, tenant in ((Role.CALLER, "acme"), (Role.CALLER, "other"), (Role.OPERATOR, ""), (Role.VIEWER, "")):
        keyring.add(role, tenant)
    acme, other, operator, viewer = keyring.tokens.values()
    stack.executor.step_seconds = 0.01
    audit = tmp_path / "audit"
    async with serve(stack.scheduler.service, guard=Guard(keyring.file, audit)) as address:

        async def begin() -> asyncio.Task[Answer]:
            await stack.manager.released()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {acme}"}
            body = json.dumps(LONG | {"request_id": "mine"})
            call = asyncio.create_task(ask(address, "POST", "/v1/completions", body, headers))
            await stack.manager.admitted(1)
            return call

        call = await begin()
        answer = await abort(address, {"rid": "mine"}, token=other)
        unknown = await abort(address, {"rid": "unknown"}, token=other)
        assert (answer.status, answer.body) == (404, unknown.body)
        for token, status in ((acme, 403), (other, 403), (viewer, 403), ("", 401)):
            assert (await abort(address, {"abort_all": True}, token=token)).status == status
        assert [json.loads(line)["outcome"] for line in audit.read_text().splitlines()] == [
            *["PERMISSION_DENIED"] * 3,
            "UNAUTHENTICATED",
        ]
        assert (await abort(address, {"rid": "mine"}, token=viewer)).status == 403
        assert not call.done()
        assert (await abort(address, {"rid": "mine"}, token=acme)).status == 200
        assert json.loads((await call).body)["choices"][0]["finish_reason"] == "abort"
        for body in ({"rid": "mine"}, {"abort_all": True}):
            call = await begin()
            answer = await abort(address, body, token=operator)
            assert json.loads(answer.body) == {"aborted_requests": 1}
            assert json.loads((await call).body)["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("at", ["router", "engine"])
async def test_a_request_of_a_router_ends_there_and_at_its_engine(tmp_path: Path, at: str) -> None:
    async with run_fleet(tmp_path) as fleet:
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.01
        begun = asyncio.Event()
        running = asyncio.create_task(generate_samples(fleet.stub, long("mine", n=2), patience(30), begun))
        await begun.wait()
        if at == "router":
            await fleet.stub.AbortRequest(pb.AbortRequestRequest(request_id="mine"))
        else:
            [engine] = [engine for engine in fleet.engines if engine.manager.live]
            async with admin_of(engine.address) as admin:
                answer = await admin.AbortRequests(pb.AbortRequestsRequest(request_id="mine"))
                assert answer.aborted_requests == 1
        outputs = await running
        for output in outputs:
            assert output.finish_reason == pb.FINISH_REASON_ABORT
            assert output.usage.output_tokens == len(output.token_ids) < 300
        assert sum(output.usage.prompt_tokens for output in outputs) == 9
        async with asyncio.timeout(patience(10)):
            while any(engine.manager.live for engine in fleet.engines):
                await asyncio.sleep(0.01)
        assert fleet.metric("continued_requests_total") == 0


@pytest.mark.parametrize("at", ["router", "engine"])
async def test_a_request_of_a_router_ends_by_the_header_of_its_call(tmp_path: Path, at: str) -> None:
    async with run_fleet(tmp_path, 1) as fleet:
        [engine] = fleet.engines
        engine.executor.step_seconds = 0.01
        call = fleet.stub.StreamGenerate(long("mine"), timeout=patience(30), metadata=[("x-request-id", "trace")])
        chunks: list[Any] = [await call.read()]
        if at == "router":
            await fleet.stub.AbortRequest(pb.AbortRequestRequest(request_id="trace"))
        else:
            async with admin_of(engine.address) as admin:
                assert (await admin.AbortRequests(pb.AbortRequestsRequest(request_id="trace"))).aborted_requests == 1
        while isinstance(chunk := await call.read(), pb.StreamGenerateResponse):
            chunks.append(chunk)
        assert chunks[-1].finish_reason == pb.FINISH_REASON_ABORT


async def test_a_request_that_waits_at_an_engine_of_a_router_ends_without_a_token(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, 1, of_engines={"max_running": 1}) as fleet:
        [engine] = fleet.engines
        engine.executor.step_seconds = 0.01
        begun = asyncio.Event()
        first = asyncio.create_task(generate_samples(fleet.stub, long("first"), patience(30), begun))
        await begun.wait()
        second = asyncio.create_task(generate_samples(fleet.stub, long("second"), patience(30)))
        await waiting(engine, 1)
        async with admin_of(engine.address) as admin:
            await admin.AbortRequests(pb.AbortRequestsRequest(request_id="second"))
            [output] = await second
            assert (output.finish_reason, output.token_ids) == (pb.FINISH_REASON_ABORT, [])
            assert output.usage.prompt_tokens == 9
            assert not output.usage.HasField("queue_time")
            assert not first.done()
            await admin.AbortRequests(pb.AbortRequestsRequest(all=True))
        await first


async def test_any_front_end_ends_the_requests_of_all(tmp_path: Path) -> None:
    address = free_address()
    async with scheduler(tmp_path, http_address=address, frontends=2) as running:
        await running.begin()
        running.executor.step_seconds = 0.02
        # Connections are shared out between the two: some meet the front end of the request, and some the other one.
        for attempt in range(8):
            body = json.dumps(LONG | {"request_id": f"mine-{attempt}", "n": 2})
            headers = {"Content-Type": "application/json", "X-Request-Id": f"trace-{attempt}"}
            call = asyncio.create_task(ask(address, "POST", "/v1/completions", body, headers))
            await running.manager.admitted(2)
            async with asyncio.timeout(patience(4)):
                while json.loads((await ask(address, "GET", "/load")).body) != {"server_load": 2}:
                    await asyncio.sleep(0.05)
            answer = await abort(address, {"rid": f"{'trace' if attempt % 2 else 'mine'}-{attempt}"})
            assert json.loads(answer.body) == {"aborted_requests": 1}
            choices = json.loads((await call).body)["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
            await running.manager.released()
        call = asyncio.create_task(ask(address, "POST", "/v1/completions", json.dumps(LONG | {"request_id": "last"})))
        await running.manager.admitted(1)
        await running.stub.AbortRequest(pb.AbortRequestRequest(request_id="last"))
        assert json.loads((await call).body)["choices"][0]["finish_reason"] == "abort"
        assert (await abort(address, {"rid": "last"})).status == 404
        assert json.loads((await abort(address, {"abort_all": True})).body) == {"aborted_requests": 0}
        async with asyncio.timeout(patience(10)):
            while json.loads((await ask(address, "GET", "/load")).body) != {"server_load": 0}:
                await asyncio.sleep(0.05)
