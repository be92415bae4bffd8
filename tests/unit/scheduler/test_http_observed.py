"""What operators see of callers by HTTP: every answer is counted, and has a line in the access log."""

import asyncio
import contextlib
import json

import pytest
from prometheus_client import REGISTRY

from scheduler.service import GenerationService
from tests.unit.scheduler.conftest import StackFactory
from tests.unit.scheduler.test_http import LEAST, ask, first_event, serve

COMPLETIONS = "/v1/completions"


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
    async with serve(GenerationService()) as address:
        assert (await ask(address, "POST", COMPLETIONS, json.dumps(LEAST))).status == 503
        await one_more(COMPLETIONS, 503, before)


async def test_a_defect_is_seen_and_its_answer_has_a_name() -> None:
    before = answered("/metrics", 500)
    async with serve(GenerationService(), registry=None) as address:
        answer = await ask(address, "GET", "/metrics", headers={"X-Request-Id": "mine"})
        await one_more("/metrics", 500, before)
    assert (answer.status, answer.headers["x-request-id"]) == (500, "mine")


async def test_a_stream_that_fails_is_counted_as_what_it_failed_of(run_stack: StackFactory) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service) as address:
        before = answered(COMPLETIONS, 503), answered(COMPLETIONS, 200)
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*address.split(":"))
        with contextlib.closing(writer):
            await first_event(stack, address, reader, writer)
            await stack.scheduler._engine.drain(0)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        await one_more(COMPLETIONS, 503, before[0])
        assert answered(COMPLETIONS, 200) == before[1]


async def test_a_caller_that_leaves_is_no_success(run_stack: StackFactory) -> None:
    async with run_stack() as stack, serve(stack.scheduler.service) as address:
        before = answered(COMPLETIONS, 499)
        stack.executor.step_seconds = 0.02
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await first_event(stack, address, reader, writer)
        writer.transport.abort()
        await one_more(COMPLETIONS, 499, before)
