"""A short run of `python -m tests.fuzz`: odd requests to every gRPC method leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.fuzz import http_bounds
from tests.fuzz.meter import Meter
from tests.fuzz.methods import discover
from tests.fuzz.report import Report
from tests.fuzz.run import fuzz_grpc
from tests.fuzz.stage import Stage
from tests.support.generation import greedy_request
from tests.support.patience import patience

pytestmark = pytest.mark.model

# 2,048 tokens of 30 layers with keys and values of 192 floats each.
POOL_BYTES = 2048 * 30 * 2 * 192 * 4
CALLS, BOUNDS_CALLS = 1200, 300


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


def test_numbers_at_the_bounds_of_their_types_cost_little_and_leave_nothing_behind(
    stage: Stage, tmp_path: Path
) -> None:
    report = Report(1, tmp_path)
    http_bounds.fuzz(stage.stack.http, report, BOUNDS_CALLS, Meter(stage, report), print)
    asyncio.run(stage.check(report))
    asyncio.run(fuzz_grpc(stage, report, BOUNDS_CALLS, print, at_bounds=True))
    print(report.text())
    asyncio.run(stage.recover(report))
    assert not report.num_faults
    assert max(row.most_loop_seconds for row in report.rows.values()) > 0


def test_a_pool_that_fills_up_is_not_taken_for_a_leak(stage: Stage) -> None:
    with grpc.insecure_channel(stage.stack.scheduler) as channel:
        stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
        for begin in (3000, 6000):
            list(stub.StreamGenerate(greedy_request(range(begin, begin + 1900), 1), timeout=patience(60)))
    assert stage.grown()["executor"] < POOL_BYTES / 3


def test_odd_calls_of_every_method_are_answered_and_leave_nothing_behind(stage: Stage, tmp_path: Path) -> None:
    methods = [
        method.name
        for name in ("scheduler", "admin", "cachemgr", "executor")
        for method in discover(getattr(stage.stack, name))
    ]
    services = {name.partition("/")[0] for name in methods}
    assert {
        "generation.v1.GenerationService",
        "generation.v1.SchedulerAdminService",
        "execution.v1.ExecutorService",
    } < services
    assert {f"kvcache.v1.Cache{kind}Service" for kind in ("Manager", "Admin", "Event")} < services
    report = Report(1, tmp_path)
    asyncio.run(fuzz_grpc(stage, report, CALLS, print))
    print(report.text())
    assert not report.num_faults
    assert set(methods) <= report.rows.keys()
    assert report.rows["generation.v1.GenerationService/StreamGenerate"].statuses["OK"]
