"""The process: becomes healthy when the stack is there, and ends in order."""

import asyncio
import json
import signal
import sys
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos.generation.v1 import generation_pb2 as pb
from tests.support.generation import generate
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.scheduler.process import SERVING, scheduler
from tests.support.scheduler.stack import refusal


async def test_the_process_serves_once_its_neighbours_do_and_finishes_requests_before_it_ends(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as running:
        watch = running.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert (await watch.read()).status != SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="waits for the executor"):
            await running.stub.GetModel(pb.GetModelRequest())
        await running.begin()
        assert (await watch.read()).status == SERVING

        executor, manager = running.executor, running.manager
        executor.gate.clear()
        request_running = asyncio.create_task(generate(running.stub, request([1, 2], 5), patience(30)))
        await manager.admitted(1)
        running.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status != SERVING
        error = await refusal(generate(running.stub, request([3], 1), patience(5)))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        executor.gate.set()
        assert (await request_running).token_ids == executor.expected([1, 2], 5)
        assert await running.end() == 0
        # Nothing waits for the end of a lease.
        assert manager.live == []


@pytest.mark.parametrize("failure", ["the cache manager registers no scheduler", "the tokenizer cannot be read"])
async def test_the_process_ends_when_its_start_fails(tmp_path: Path, failure: str) -> None:
    async with scheduler(tmp_path) as running:
        if "registers" in failure:
            running.manager.refuses_schedulers = True
        else:
            running.executor.tokenizer_json = b"not a tokenizer"
        await running.neighbours.start()
        running.neighbours.set_serving(True)
        assert await running.end(20) == 1


async def test_an_operator_drains_the_process_and_takes_it_back(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as running:
        await running.begin()
        watch = running.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert (await watch.read()).status == SERVING
        executor, manager = running.executor, running.manager
        executor.gate.clear()
        request_running = asyncio.create_task(generate(running.stub, request([1, 2], 5), patience(30)))
        await manager.admitted(1)
        draining = pb.SetDrainingRequest(draining=True, validate_only=True)
        await running.admin.SetDraining(draining, timeout=patience(5))
        draining.validate_only = False
        answer = await running.admin.SetDraining(draining, timeout=patience(5))
        assert answer.running_requests + answer.waiting_requests == 1
        assert (await watch.read()).status != SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="the scheduler is draining"):
            await generate(running.stub, request([3], 1), patience(5))
        # Accepted requests continue, and it does not end by itself.
        executor.gate.set()
        assert (await request_running).token_ids == executor.expected([1, 2], 5)
        await running.admin.SetDraining(pb.SetDrainingRequest(draining=False), timeout=patience(5))
        assert (await watch.read()).status == SERVING
        assert (await generate(running.stub, request([3], 1), patience(30))).token_ids == executor.expected([3], 1)
        await running.admin.SetDraining(draining, timeout=patience(5))
        running.process.send_signal(signal.SIGTERM)
        assert await running.end() == 0


async def rest(call: "grpc.aio.UnaryStreamCall") -> None:
    """Reads to the end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_request_that_does_not_end_in_time_fails_and_frees_its_blocks(tmp_path: Path) -> None:
    async with scheduler(tmp_path, drain_seconds=0.3) as running:
        await running.begin()
        running.executor.step_seconds = 0.02
        call = running.stub.StreamGenerate(request([1, 2], 390), timeout=patience(30))
        await call.read()
        running.process.send_signal(signal.SIGTERM)
        error = await refusal(rest(call))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert await running.end() == 0
        assert running.manager.live == []


async def test_an_executor_that_does_not_answer_does_not_keep_the_process(tmp_path: Path) -> None:
    async with scheduler(tmp_path, drain_seconds=0.1) as running:
        await running.begin()
        running.executor.gate.clear()
        call = running.stub.StreamGenerate(request([1, 2], 5), timeout=patience(30))
        await running.manager.admitted(1)
        running.process.send_signal(signal.SIGTERM)
        assert (await refusal(call.read())).reason == "DRAINING"
        assert await running.end() == 0


async def test_a_second_signal_ends_requests_and_the_process_at_once(tmp_path: Path) -> None:
    async with scheduler(tmp_path, drain_seconds=600) as running:
        await running.begin()
        running.executor.gate.clear()
        call = running.stub.StreamGenerate(request([1, 2], 5), timeout=patience(30))
        await running.manager.admitted(1)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(running.stub, request([3], 1), patience(5))
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        # Far sooner than requests may take to end.
        assert await running.end(60) == 0


async def test_health_says_when_the_cache_manager_does_not_answer_and_requests_wait_for_it(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as running:
        await running.begin()
        watch = running.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert (await watch.read()).status == SERVING
        running.manager.gate.clear()
        waiting = asyncio.create_task(generate(running.stub, request([1, 2], 5), patience(30)))
        assert (await watch.read()).status != SERVING
        # An operator's word does not hide it.
        await running.admin.SetDraining(pb.SetDrainingRequest(draining=True))
        await running.admin.SetDraining(pb.SetDrainingRequest(draining=False))
        answer = await running.health.Check(health_pb2.HealthCheckRequest())
        assert answer.status != SERVING
        running.manager.gate.set()
        assert (await watch.read()).status == SERVING
        assert (await waiting).token_ids == running.executor.expected([1, 2], 5)


async def test_a_stream_of_a_killed_process_breaks(tmp_path: Path) -> None:
    http = free_address()
    async with scheduler(tmp_path, http_address=http) as running:
        await running.begin()
        running.executor.step_seconds = 0.02
        stream = running.stub.StreamGenerate(request([1, 2], 390), timeout=patience(30))
        await stream.read()
        connection = HTTPConnection(http, timeout=patience(30))
        body = json.dumps({"prompt": [3, 4], "max_tokens": 390, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = await asyncio.to_thread(connection.getresponse)
        assert (await asyncio.to_thread(answer.readline)).startswith(b"data: ")
        command = [sys.executable, "-m", "scheduler.generate", "x", "--raw", "--address", f"unix:{tmp_path}/scheduler"]
        client = await asyncio.create_subprocess_exec(
            *command, "--max-tokens", "390", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        await client.stdout.read(1)
        running.process.kill()
        with pytest.raises((IncompleteRead, ConnectionResetError)):
            await asyncio.to_thread(answer.read)
        connection.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        _, said = await client.communicate()
        assert client.returncode == 1
        assert b"the connection broke after" in said
