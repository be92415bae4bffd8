"""Requests through a router: tokens equal those of one engine, whichever engine runs them and whatever dies."""

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.errors import UnexpectedError, to_status
from protos.rpc.security import Security
from protos.rpc.server import Server
from protos.rpc.settings import SettingsError, load
from scheduler import app
from scheduler.core import loop
from scheduler.frontend import engine_service
from scheduler.router import engine_link, process
from scheduler.router import fleet as fleet_module
from scheduler.router.engine_link import EngineLink
from scheduler.router.engine_list import EngineList
from scheduler.router.key_space import KeySpace
from scheduler.router.reports import EngineReports
from scheduler.router.settings import RouterSettings
from tests.chaos.proxies import SocketProxy
from tests.support.generation import generate, generate_samples, greedy_request
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import MODEL, FakeExecutor
from tests.support.scheduler.fleet import Engine, Fleet, run_engine, run_fleet, run_router
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import prompt_of, refusal
from tests.support.until import until


async def test_requests_get_the_tokens_of_one_engine_and_both_engines_run_some(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        prompts = [prompt_of(20 + seed, seed) for seed in range(12)]
        outputs = await asyncio.gather(*[generate(fleet.stub, greedy_request(prompt, 16)) for prompt in prompts])
        expected = fleet.engines[0].executor.expected
        assert [output.token_ids for output in outputs] == [expected(prompt, 16) for prompt in prompts]
        assert all(engine.executor.steps for engine in fleet.engines)


async def test_text_stop_strings_and_log_probabilities_are_those_of_one_engine(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        request = greedy_request(prompt_of(20), 40, sampling=pb.SamplingParams(num_logprobs=2))
        direct = await generate(fleet.engines[0].stub, request)
        routed = await generate(fleet.stub, request)
        assert (routed.token_ids, routed.text) == (direct.token_ids, direct.text)
        request.stop.append(direct.text[10:14])
        stopped = await generate(fleet.stub, request)
        assert stopped.finish_reason == pb.FINISH_REASON_STOP
        assert stopped.text == direct.text[: direct.text.index(direct.text[10:14])]


async def test_samples_are_those_of_one_engine_and_run_on_one(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        sampling = pb.SamplingParams(temperature=1, seed=7)
        request = greedy_request(prompt_of(20), 10, sampling=sampling, n=3)
        direct = await generate_samples(fleet.engines[0].stub, request)
        routed = await generate_samples(fleet.stub, request)
        assert [output.token_ids for output in routed] == [output.token_ids for output in direct]
        assert [output.usage.prompt_tokens for output in routed] == [20, 0, 0]


async def test_engines_behind_one_cache_manager_run_requests_of_one_id(tmp_path: Path) -> None:
    executors = [FakeExecutor(), FakeExecutor()]
    executors[1].executor_id = "executor-1"
    manager = RealManager(executors[0])
    manager.join(executors[1])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    prompts = [prompt_of(20, seed) for seed in range(2)]
    async with (
        run_engine(tmp_path / "a", executors[0], manager) as first,
        run_engine(tmp_path / "b", executors[1], manager) as second,
    ):
        # As when a router continues a request elsewhere before the lease of its engine has ended.
        requests = [greedy_request(prompt, 16, request_id="same") for prompt in prompts]
        outputs = await asyncio.gather(generate(first.stub, requests[0]), generate(second.stub, requests[1]))
    assert [output.token_ids for output in outputs] == [executors[0].expected(prompt, 16) for prompt in prompts]


async def test_a_stream_continues_elsewhere_when_its_engine_dies(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.01
        prompts = [prompt_of(20, seed) for seed in range(6)]
        begun = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 60), begun=event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*[event.wait() for event in begun])
        await fleet.engines[1].kill()
        outputs = await asyncio.gather(*running)
        expected = fleet.engines[0].executor.expected
        assert [output.token_ids for output in outputs] == [expected(prompt, 60) for prompt in prompts]
        assert fleet.metric("continued_requests_total") == 3
        await fleet.ready(1)


async def test_a_stream_that_its_engine_has_ended_waits_for_no_more_commands(tmp_path: Path) -> None:
    def waiting() -> int:
        return sum("_consume_request_iterator" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async with run_fleet(tmp_path, count=1) as fleet:
        assert waiting() == 1
        await fleet.engines[0].kill()
        await fleet.ready(0)
        async with asyncio.timeout(patience(10)):
            while waiting():
                await asyncio.sleep(0.01)


async def test_a_load_counts_no_requests_that_end_or_fail_in_its_message(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, count=1) as fleet:
        [engine], [link] = fleet.engines, fleet.router.fleet.links.values()
        engine.executor.gate.clear()
        requests = [greedy_request(prompt_of(20, seed), 4) for seed in range(2)]
        running = [asyncio.create_task(generate(fleet.stub, request)) for request in requests]
        async with asyncio.timeout(patience(20)):
            while len(fleet.router.fleet.on(link)) < len(running):
                await asyncio.sleep(0.01)
        ended, failed = fleet.router.fleet.on(link)
        status = to_status(UnexpectedError("it failed")).SerializeToString()
        message = pb.StreamRequestsResponse(
            outputs=[pb.StreamGenerateResponse(request_id=ended.name, finish_reason=pb.FINISH_REASON_LENGTH)],
            failures=[pb.RequestFailure(request_id=failed.name, status=status)],
            loads=pb.GetLoadsResponse(running_requests=5, max_running_requests=64, max_waiting_requests=64),
        )
        table = fleet.router.requests
        EngineReports(fleet.router.fleet, table, fleet.router._router_metrics, table.adapters).received(link, message)
        assert link.load == 5
        for task in running:
            task.cancel()
        engine.executor.gate.set()
        await asyncio.gather(*running, return_exceptions=True)


class Garbling(rpc.EngineServiceServicer):
    """An engine whose answers no router can read."""

    def __init__(self, engine: pb.GetEngineResponse) -> None:
        self._engine = engine
        self.requests = 0

    async def GetEngine(self, request: Any, context: Any) -> pb.GetEngineResponse:
        return self._engine

    async def StreamRequests(self, commands: Any, context: Any) -> AsyncIterator[pb.StreamRequestsResponse]:
        yield pb.StreamRequestsResponse(loads=pb.GetLoadsResponse(max_waiting_requests=9))
        async for command in commands:
            self.requests += 1
            name = command.start.request.request_id
            output = pb.StreamGenerateResponse(request_id=name, token_ids=[7])
            failure = pb.RequestFailure(request_id=name, status=b"\xff")
            yield pb.StreamRequestsResponse(outputs=[output], failures=[failure])


def test_a_prompt_with_its_first_token_is_no_longer_queued_whenever_the_load_was_taken() -> None:
    link = EngineLink("engine", Security(), pb.GetEngineResponse())
    load = pb.StreamRequestsResponse(loads=pb.GetLoadsResponse(running_requests=1, queued_prompt_tokens=41))
    begun = time.monotonic()
    link.start(pb.StartRequest(), prompt_tokens=41, expected_tokens=0)
    assert link.queued_tokens(begun) == 41
    link.take_loads(load)
    assert link.queued_tokens(time.monotonic()) == 41
    link.note_computed(begun, 41)
    assert link.queued_tokens(time.monotonic()) == 0
    # The next load counts without that prompt, and a prompt that began after a load is not in the load.
    load.loads.queued_prompt_tokens = 7
    link.take_loads(load)
    begun = time.monotonic()
    link.start(pb.StartRequest(), prompt_tokens=41, expected_tokens=0)
    assert link.queued_tokens(begun) == 48
    link.note_computed(begun, 41)
    assert link.queued_tokens(begun) == 7


async def test_an_engine_that_no_router_can_read_is_lost_and_no_token_with_it(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    async with run_fleet(tmp_path, 1) as fleet:
        garbling = Garbling(fleet.engines[0].scheduler.engine)
        server, address = Server("scheduler", drain_seconds=0), f"unix:{tmp_path}/garbling"
        server.listen(
            address, {"generation.v1.EngineService": partial(rpc.add_EngineServiceServicer_to_server, garbling)}
        )
        await server.start()
        file.write_text(f"{address}\n{fleet.engines[0].address}")
        (tmp_path / "second").mkdir()
        try:
            settings = {"engines": f"file://{file}", "policy": "round-robin"}
            async with run_router(tmp_path / "second", fleet.engines, **settings) as both:
                await both.ready(2)
                prompt = prompt_of(20)
                outputs = [await generate(both.stub, greedy_request(prompt, 6)) for _ in range(2)]
                assert garbling.requests
                expected = fleet.engines[0].executor.expected
                assert sorted(output.token_ids for output in outputs) == sorted(
                    [expected(prompt, 6), [7, *expected([*prompt, 7], 5)]]
                )
                assert not both.router.failed.is_set()
        finally:
            await server.stop()


async def test_a_router_whose_own_work_fails_says_so(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, 1) as fleet:
        # No engine can make it fail; a defect can.
        fleet.router.view._masks = None  # type: ignore[assignment]
        async with asyncio.timeout(patience(10)):
            await fleet.router.failed.wait()


@pytest.mark.parametrize("neighbour", ["executor", "cache manager"])
async def test_requests_go_on_elsewhere_when_a_neighbour_of_their_engine_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbour: str
) -> None:
    monkeypatch.setattr(engine_link, "HESITATION_SECONDS", 1_000.0)
    monkeypatch.setattr(engine_link, "NO_BLOCKS_SECONDS", 1_000.0)
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        silent = fleet.engines[1]
        # None ends before all of them are placed.
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.05
        gate = silent.executor.gate if neighbour == "executor" else silent.manager.gate
        prompts = [prompt_of(20, seed) for seed in range(6)]
        begun = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 60), begun=event))
            for prompt, event in zip(prompts[:4], begun, strict=False)
        ]
        await asyncio.gather(*[event.wait() for event in begun[:4]])
        gate.clear()
        # These have no token yet.
        running += [asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 60))) for prompt in prompts[4:]]
        placed = fleet.router.fleet
        async with asyncio.timeout(patience(20)):
            while sum(len(placed.on(link)) for link in placed.links.values()) < len(prompts):
                await asyncio.sleep(0.01)
        # Only now: an engine that is known to be silent gets no request. And so wide that the other one, which may be
        # late on a busy machine, is not said to be silent too.
        monkeypatch.setattr(loop, "LATE_SECONDS", 2.0)
        monkeypatch.setattr(app, "SILENCE_SECONDS", 2.0)
        async with asyncio.timeout(patience(60)):
            outputs = await asyncio.gather(*running)
        assert not gate.is_set()
        expected = fleet.engines[0].executor.expected
        assert [output.token_ids for output in outputs] == [expected(prompt, 60) for prompt in prompts]
        assert fleet.metric("continued_requests_total") == 3
        gate.set()
        await fleet.ready(2)


@pytest.mark.parametrize("neighbour", ["executor", "cache manager"])
async def test_requests_leave_an_engine_long_before_its_health_says_that_a_neighbour_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbour: str
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 1_000.0)
    monkeypatch.setattr(app, "SILENCE_SECONDS", 1_000.0)
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        hung = fleet.engines[1]
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.01
        # How long a step takes is known from then on.
        for seed in range(2):
            await generate(fleet.stub, greedy_request(prompt_of(20, seed), 8))
        prompts = [prompt_of(20, seed) for seed in range(2, 6)]
        begun = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 200), begun=event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*[event.wait() for event in begun])
        (hung.executor.gate if neighbour == "executor" else hung.manager.gate).clear()
        async with asyncio.timeout(patience(60)):
            outputs = await asyncio.gather(*running)
            # And new ones go to the other engine at once.
            begin = fleet.metric("routed_requests_total", engine=hung.address)
            for seed in range(6, 9):
                await generate(fleet.stub, greedy_request(prompt_of(20, seed), 4))
        expected = hung.executor.expected
        assert [output.token_ids for output in outputs] == [expected(prompt, 200) for prompt in prompts]
        assert fleet.metric("continued_requests_total") == 2
        assert fleet.metric("routed_requests_total", engine=hung.address) == begin
        assert hung.scheduler.requests.obstacle == ""
        (hung.executor.gate if neighbour == "executor" else hung.manager.gate).set()
        async with asyncio.timeout(patience(20)):
            while any(link.hesitates for link in fleet.router.fleet.links.values()):
                await asyncio.sleep(0.01)


async def test_a_request_without_a_token_leaves_an_engine_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the engine is lost: its scheduler may be stopped, or cut off."""
    monkeypatch.setattr(engine_link, "SILENCE_SECONDS", 1_000.0)
    for name in ("away", "well"):
        (tmp_path / name).mkdir()
    async with run_engine(tmp_path / "away") as away, run_engine(tmp_path / "well") as well:
        way = SocketProxy(tmp_path / "way.sock", Path(away.address.removeprefix("unix:")))
        await way.start()
        engines = f"unix:{way.address},{well.address}"
        async with run_router(tmp_path, [away, well], engines=engines, policy="round-robin") as fleet:
            way.hold()
            prompts = [prompt_of(20, seed) for seed in range(4)]
            async with asyncio.timeout(patience(60)):
                outputs = await asyncio.gather(*[generate(fleet.stub, greedy_request(prompt, 8)) for prompt in prompts])
            assert [output.token_ids for output in outputs] == [well.executor.expected(prompt, 8) for prompt in prompts]
            assert fleet.metric("continued_requests_total") == 2
            way.mend()
        await way.stop()


async def test_requests_go_on_elsewhere_as_soon_as_their_executor_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 1_000.0)
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.01
        dying = fleet.engines[1].executor
        prompts = [prompt_of(20, seed) for seed in range(4)]
        begun = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 60), begun=event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*[event.wait() for event in begun])
        dying.opens.clear()
        dying.break_session()
        async with asyncio.timeout(patience(20)):
            outputs = await asyncio.gather(*running)
        assert not dying.opens.is_set()
        assert [output.token_ids for output in outputs] == [dying.expected(prompt, 60) for prompt in prompts]
        assert fleet.metric("continued_requests_total") == 2
        dying.opens.set()
        await fleet.ready(2)


async def test_requests_stay_where_they_are_while_no_engine_would_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 0.3)
    async with run_fleet(tmp_path, count=1) as fleet:
        executor = fleet.engines[0].executor
        executor.step_seconds = 0.01
        begun = asyncio.Event()
        running = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(20), 60), begun=begun))
        await begun.wait()
        executor.gate.clear()
        await fleet.ready(0)
        executor.gate.set()
        assert (await running).token_ids == executor.expected(prompt_of(20), 60)
        assert fleet.metric("continued_requests_total") == 0


async def test_requests_of_a_lost_engine_wait_until_another_one_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 1_000.0)
    # The executors are held.
    monkeypatch.setattr(engine_link, "HESITATION_SECONDS", 1_000.0)
    small = {"max_running": 1, "max_waiting": 1}
    async with run_fleet(tmp_path, policy="round-robin", of_engines=small) as fleet:
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.01
        prompts = [prompt_of(20, seed) for seed in range(4)]
        begun = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 40), begun=event))
            for prompt, event in zip(prompts[:2], begun, strict=False)
        ]
        await asyncio.gather(*(event.wait() for event in begun[:2]))
        # None ends before both engines have one waiting.
        for engine in fleet.engines:
            engine.executor.gate.clear()
        for number, prompt in enumerate(prompts[2:], 1):
            running.append(asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 40))))
            async with asyncio.timeout(patience(20)):
                while sum(engine.scheduler.requests.num_waiting for engine in fleet.engines) < number:
                    await asyncio.sleep(0.01)
        assert [engine.scheduler.requests.num_waiting for engine in fleet.engines] == [1, 1]
        await fleet.engines[1].kill()
        for engine in fleet.engines:
            engine.executor.gate.set()
        outputs = await asyncio.gather(*running)
        expected = fleet.engines[0].executor.expected
        assert [output.token_ids for output in outputs] == [expected(prompt, 40) for prompt in prompts]


async def test_a_request_that_finds_a_queue_full_goes_to_an_engine_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 1_000.0)
    # The executors are held.
    monkeypatch.setattr(engine_link, "HESITATION_SECONDS", 1_000.0)
    small = {"max_running": 1, "max_waiting": 2}
    async with run_fleet(tmp_path, policy="round-robin", of_engines=small) as fleet:
        full = fleet.engines[0]
        # The router does not learn of requests that a different router sends there.
        monkeypatch.setattr(engine_service, "LOADS_SECONDS", 1_000.0)
        prompts, begun = [prompt_of(20, seed) for seed in range(5)], asyncio.Event()
        running = [asyncio.create_task(generate(full.stub, greedy_request(prompts[0], 40), begun=begun))]
        await begun.wait()
        for engine in fleet.engines:
            engine.executor.gate.clear()
        running += [asyncio.create_task(generate(full.stub, greedy_request(prompt, 40))) for prompt in prompts[1:3]]
        async with asyncio.timeout(patience(20)):
            while full.scheduler.requests.num_waiting < 2:
                await asyncio.sleep(0.01)
        running += [asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 40))) for prompt in prompts[3:]]
        free = fleet.engines[1].scheduler.requests
        async with asyncio.timeout(patience(20)):
            while free.num_running + free.num_waiting < 2:
                await asyncio.sleep(0.01)
        for engine in fleet.engines:
            engine.executor.gate.set()
        outputs = await asyncio.gather(*running)
        assert [output.token_ids for output in outputs] == [full.executor.expected(prompt, 40) for prompt in prompts]


async def test_a_pause_of_the_router_itself_loses_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_fleet(tmp_path, count=3) as fleet:
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.01
        prompts = [prompt_of(20, seed) for seed in range(6)]
        begun = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 60), begun=event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*[event.wait() for event in begun])
        # Less than the pause, and more than what may count of it with the turn before. Only now: from here on each
        # engine has tokens to send, where an idle one says its load twice a second.
        monkeypatch.setattr(engine_link, "SILENCE_SECONDS", 1.5)
        # The executors are on this loop, too, and their schedulers' threads go on.
        monkeypatch.setattr(engine_link, "HESITATION_SECONDS", 1_000.0)
        # The loop stands still, as that of a process that is stopped.
        time.sleep(2.0)  # noqa: ASYNC251
        outputs = await asyncio.gather(*running)
        expected = fleet.engines[0].executor.expected
        assert [output.token_ids for output in outputs] == [expected(prompt, 60) for prompt in prompts]
        assert fleet.metric("continued_requests_total") == 0


async def test_a_request_outlives_the_loss_of_all_connections_at_once(tmp_path: Path) -> None:
    count = 4
    proxies = [SocketProxy(tmp_path / f"proxy-{n}", tmp_path / f"engine-{n}" / "scheduler") for n in range(count)]
    for proxy in proxies:
        await proxy.start()
    addresses = ",".join(f"unix:{proxy.address}" for proxy in proxies)
    async with run_fleet(tmp_path, count, policy="round-robin", engines=addresses) as fleet:
        # No request has a token when its engine is lost.
        for engine in fleet.engines:
            engine.executor.gate.clear()
        prompts = [prompt_of(20, seed) for seed in range(8)]
        running = [asyncio.create_task(generate(fleet.stub, greedy_request(prompt, 8))) for prompt in prompts]
        async with asyncio.timeout(patience(10)):
            while sum(engine.scheduler.requests.num_running for engine in fleet.engines) < len(prompts):
                await asyncio.sleep(0.01)
        for proxy in proxies:
            proxy.cut()
        await fleet.ready(0)
        for proxy in proxies:
            proxy.mend()
        for engine in fleet.engines:
            engine.executor.gate.set()
        outputs = await asyncio.gather(*running)
        expected = fleet.engines[0].executor.expected
        assert [output.token_ids for output in outputs] == [expected(prompt, 8) for prompt in prompts]
    for proxy in proxies:
        await proxy.stop()


async def test_a_request_outlives_a_machine_whose_executors_end_before_their_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 1_000.0)
    # The executors are held.
    monkeypatch.setattr(engine_link, "HESITATION_SECONDS", 1_000.0)
    monkeypatch.setattr(fleet_module, "NOTICED_SECONDS", 1_000.0)

    def running() -> list[Engine]:
        return [engine for engine in fleet.engines if engine.scheduler.requests.num_running]

    async with run_fleet(tmp_path, count=3, policy="round-robin") as fleet:
        for engine in fleet.engines:
            engine.executor.gate.clear()
        request = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(20), 8)))
        left = list(fleet.engines)
        for _ in range(2):
            await until(running)
            [dying] = running()
            left.remove(dying)
            dying.executor.opens.clear()
            dying.executor.break_session()
            await until(lambda dying=dying: dying not in running())
        [last] = left
        link = fleet.router.fleet.links[last.address]
        for _ in range(3):
            heard_at = link.heard_at
            await until(lambda heard_at=heard_at: link.heard_at > heard_at)
        # The last engine reports, but its machine may be dying.
        assert not running()
        last.executor.opens.clear()
        last.executor.break_session()
        await fleet.ready(0)
        monkeypatch.setattr(fleet_module, "NOTICED_SECONDS", 0.0)
        for engine in fleet.engines:
            engine.executor.gate.set()
            engine.executor.opens.set()
        assert (await request).token_ids == last.executor.expected(prompt_of(20), 8)


async def measured(fleet: Fleet, **wanted: float) -> None:
    """Waits until the router's metrics have these values: its engines by state, and its incomplete views."""
    async with asyncio.timeout(patience(20)):
        while wanted != {
            name: fleet.metric("incomplete_views") if name == "incomplete" else fleet.metric("engines", state=name)
            for name in wanted
        }:
            await asyncio.sleep(0.01)


async def test_requests_wait_while_no_engine_answers_and_health_says_so(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, count=1) as fleet:
        await measured(fleet, ready=1, away=0)
        with capture_logs() as logs:
            await fleet.engines[0].kill()
            await fleet.ready(0)
            await measured(fleet, ready=0, away=1)
        [line] = [line for line in logs if line["event"] == "no engine takes requests"]
        assert fleet.engines[0].address in line["cause"]
        # Callers are told no addresses.
        assert fleet.router.requests.obstacle == "no engine takes requests: new requests wait"
        waiting = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(8), 4)))
        async with asyncio.timeout(patience(10)):
            while fleet.router.requests.num_waiting != 1:
                await asyncio.sleep(0.01)
        waiting.cancel()
        async with asyncio.timeout(patience(10)):
            while fleet.router.requests.num_waiting:
                await asyncio.sleep(0.01)


async def test_an_engine_whose_events_cannot_be_followed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOOKUP_SECONDS", 0.02)
    file, blind = tmp_path / "engines", tmp_path / "blind"
    seen = f"unix:{tmp_path}/engine-0/scheduler"
    file.write_text(seen)
    blind.mkdir()
    executor = FakeExecutor()
    executor.executor_id = "blind"
    async with (
        run_fleet(tmp_path, 1, engines=f"file://{file}") as fleet,
        run_engine(blind, executor, cachemgr_admin_address=f"unix:{blind}/nobody") as engine,
    ):
        await measured(fleet, ready=1, incomplete=0)
        file.write_text(f"{seen}\n{engine.address}")
        await measured(fleet, ready=2, incomplete=1)
        await engine.kill()
        # What does not answer is away, and not counted twice.
        await measured(fleet, away=1, incomplete=0)


async def test_a_drained_engine_gets_no_more_requests(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        fleet.engines[0].scheduler.requests.set_draining(True)
        outputs = await asyncio.gather(*[generate(fleet.stub, greedy_request(prompt_of(9, s), 4)) for s in range(4)])
        assert all(len(output.token_ids) == 4 for output in outputs)
        assert not fleet.engines[0].executor.steps
        await fleet.ready(1)


async def test_a_cancelled_request_frees_its_blocks(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, count=1) as fleet:
        fleet.engines[0].executor.step_seconds = 0.01
        begun = asyncio.Event()
        running = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(20), 200), begun=begun))
        await begun.wait()
        running.cancel()
        async with asyncio.timeout(patience(10)):
            while fleet.engines[0].scheduler.requests.num_running or fleet.router.requests.num_running:
                await asyncio.sleep(0.01)


async def test_the_keys_of_a_long_prompt_are_computed_in_turns_and_find_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "BLOCKS_AT_ONCE", 2)
    async with run_fleet(tmp_path, policy="prefix") as fleet:
        await fleet.knows(2)
        prompts = [prompt_of(80, seed) for seed in range(4)]
        await asyncio.gather(*[generate(fleet.stub, greedy_request(prompt, 2)) for prompt in prompts])
        await fleet.views(4 * 20)
        monkeypatch.setattr(KeySpace, "keys", unexpected)
        for prompt in prompts:
            again = await generate(fleet.stub, greedy_request(prompt, 2))
            assert again.usage.cached_tokens == 79


async def test_a_request_that_is_cancelled_before_its_keys_are_computed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "BLOCKS_AT_ONCE", 2)
    async with run_fleet(tmp_path) as fleet:
        await fleet.knows(2)
        hashing = asyncio.Event()
        monkeypatch.setattr(fleet_module, "hash_prompt", partial(_never, hashing))
        running = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(80), 4)))
        await asyncio.wait_for(hashing.wait(), patience(10))
        [preparing] = fleet.router.fleet.preparing.values()
        assert fleet.router.requests.num_waiting == 1
        running.cancel()
        await asyncio.wait([preparing], timeout=patience(10))
        assert preparing.cancelled()
        assert not fleet.router.fleet.preparing
        assert not any(fleet.router.fleet.on(link) for link in fleet.router.fleet.links.values())


async def test_prompts_are_hashed_one_after_the_other_and_those_of_one_request_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "BLOCKS_AT_ONCE", 2)
    at_once, hashed = [0, 0], 0
    hash_prompt = fleet_module.hash_prompt

    async def counted(*arguments: Any) -> Any:
        nonlocal hashed
        hashed += 1
        at_once[0] += 1
        at_once[1] = max(at_once)
        found = await hash_prompt(*arguments)
        at_once[0] -= 1
        return found

    monkeypatch.setattr(fleet_module, "hash_prompt", counted)
    async with run_fleet(tmp_path) as fleet:
        await fleet.knows(2)
        sampling = pb.SamplingParams(temperature=1, seed=7)
        several = greedy_request(prompt_of(80, 9), 2, sampling=sampling, n=4)
        await asyncio.gather(
            *[generate(fleet.stub, greedy_request(prompt_of(80, seed), 2)) for seed in range(4)],
            generate_samples(fleet.stub, several),
        )
    assert at_once == [0, 1]
    assert 5 <= hashed <= 8


async def test_the_keys_of_a_request_that_no_engine_takes_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "BLOCKS_AT_ONCE", 2)
    async with run_fleet(tmp_path) as fleet:
        await fleet.knows(2)
        for engine in fleet.engines:
            engine.scheduler.requests.set_draining(True)
        await fleet.ready(0)
        waiting = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(80), 2)))
        async with asyncio.timeout(patience(10)):
            while not fleet.router.requests.num_waiting:
                await asyncio.sleep(0.001)
        assert not fleet.router.fleet.preparing
        for engine in fleet.engines:
            engine.scheduler.requests.set_draining(False)
        assert (await waiting).usage.prompt_tokens == 80


async def test_a_router_that_cannot_send_a_long_prompt_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "BLOCKS_AT_ONCE", 2)
    async with run_fleet(tmp_path) as fleet:
        await fleet.knows(2)
        monkeypatch.setattr(fleet.router.fleet, "_choose", unexpected)
        with capture_logs() as logs:
            failing = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(80), 2)))
            await asyncio.wait_for(fleet.router.failed.wait(), patience(10))
            failing.cancel()
        assert "a request could not be sent to an engine" in [entry["event"] for entry in logs]


def unexpected(*_: object) -> None:
    raise AssertionError


async def _never(begun: asyncio.Event, *_: object) -> None:
    begun.set()
    await asyncio.Event().wait()


@pytest.mark.parametrize("blocks", [1, 3, 100])
@pytest.mark.parametrize("tokens", [0, 3, 16, 100, 16 * 6])
def test_keys_in_parts_are_those_of_the_whole_prompt(tokens: int, blocks: int) -> None:
    space, prompt = KeySpace(b"fingerprint", 16), array("I", prompt_of(tokens, 5))
    for salt, adapter in ((None, None), ("acme", 7)):
        parts = list(space.keys_in_parts(prompt, salt, adapter, blocks))
        assert [key for part in parts for key in part] == list(space.keys(prompt, salt, adapter))
        assert all(len(part) <= blocks for part in parts)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 0, "n": 2}, "n"),
        ({"max_tokens": 1 << 20}, "max_tokens"),
        ({"token_ids": pb.TokenIds(token_ids=[1 << 30])}, "token_ids.token_ids[0]"),
    ],
)
async def test_bad_input_is_refused_by_the_router_itself(tmp_path: Path, change: dict[str, object], field: str) -> None:
    async with run_fleet(tmp_path, count=1) as fleet:
        request = pb.StreamGenerateRequest(**{"token_ids": pb.TokenIds(token_ids=[1]), "max_tokens": 2} | change)  # type: ignore[arg-type]
        error = await refusal(generate(fleet.stub, request))
        assert field in error.fields
        assert not fleet.metric("routed_tokens_total")


async def test_what_an_engine_refuses_reaches_the_caller_as_it_is(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, count=1) as fleet:
        request = greedy_request(prompt_of(20), 4)
        request.cache.kv_hints.protocol_version = "9"
        direct = await refusal(generate(fleet.engines[0].stub, request))
        routed = await refusal(generate(fleet.stub, request))
        assert (routed.code, routed.reason, routed.message) == (direct.code, direct.reason, direct.message)
        assert routed.fields == direct.fields


async def test_engines_of_a_file_come_and_go_with_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOKUP_SECONDS", 0.02)
    read, times_read = EngineList.addresses, 0

    async def counted(found_in: EngineList) -> list[str]:
        nonlocal times_read
        found = await read(found_in)
        times_read += 1
        return found

    monkeypatch.setattr(EngineList, "addresses", counted)

    async def looked_up() -> None:
        """Waits until the file was read from its beginning since: the first reading may have begun before."""
        before = times_read
        async with asyncio.timeout(patience(20)):
            while times_read < before + 2:
                await asyncio.sleep(0.01)

    file = tmp_path / "engines"
    addresses = [f"unix:{tmp_path}/engine-{number}/scheduler" for number in range(3)]
    file.write_text("\n".join(addresses[:2]))
    (tmp_path / "engine-2").mkdir()
    async with run_fleet(tmp_path, engines=f"file://{file}", policy="round-robin") as fleet:
        async with run_engine(tmp_path / "engine-2") as third:
            file.write_text("\n".join(addresses))
            await fleet.ready(3)
            outputs = [await generate(fleet.stub, greedy_request(prompt_of(20, seed), 4)) for seed in range(3)]
            assert [len(output.token_ids) for output in outputs] == [4] * 3
            assert third.executor.steps
            assert fleet.metric("routed_requests_total", engine=third.address)
            await fleet.knows(3)
            # Without its line it gets no more requests, and stays for those that it has.
            third.executor.gate.clear()
            running = [asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(20, 9), 4))) for _ in range(3)]
            async with asyncio.timeout(patience(20)):
                while sum(task.done() for task in running) != 2 or not fleet.router.fleet.on(link_of(fleet, third)):
                    await asyncio.sleep(0.01)
            file.write_text("\n".join(addresses[:2]))
            await looked_up()
            assert set(fleet.router.fleet.links) == set(addresses)
            sent = fleet.metric("routed_requests_total", engine=third.address)
            for seed in range(4):
                await generate(fleet.stub, greedy_request(prompt_of(20, seed), 4))
            assert fleet.metric("routed_requests_total", engine=third.address) == sent
            third.executor.gate.set()
            assert [len(output.token_ids) for output in await asyncio.gather(*running)] == [4] * 3
            async with asyncio.timeout(patience(20)):
                while set(fleet.router.fleet.links) != set(addresses[:2]):
                    await asyncio.sleep(0.01)
        await fleet.ready(2)
        async with asyncio.timeout(patience(20)):
            while set(fleet.router.fleet.links) != set(addresses[:2]):
                await asyncio.sleep(0.01)
        # Its cache manager is no longer followed, and its requests are no longer counted.
        await fleet.knows(2)
        assert not fleet.metric("routed_requests_total", engine=third.address)
        # A line that is no address is reported once, and the other lines count.
        with capture_logs() as logs:
            file.write_text("\n".join(["unix:engine", *addresses[:2]]))
            async with asyncio.timeout(patience(20)):
                while not any(line["event"] == "an address cannot be used" for line in logs):
                    await asyncio.sleep(0.01)
            await looked_up()
        [line] = [line for line in logs if line["event"] == "an address cannot be used"]
        assert (line["address"], line["source"]) == ("unix:engine", f"file://{file}")
        assert set(fleet.router.fleet.links) == set(addresses[:2])
        # With a file that has no text, without the file, and with something else in its place, the router keeps the
        # engines that it found last, and says once why.
        with capture_logs() as logs:
            for change in (
                lambda: file.write_bytes(b"\xff"),
                lambda: file.write_text(" \n"),
                file.unlink,
                lambda: os.mkfifo(file),
            ):
                change()
                await looked_up()
                output = await generate(fleet.stub, greedy_request(prompt_of(20), 4))
                assert len(output.token_ids) == 4
        causes = [line["cause"] for line in logs if line["event"] == "engines cannot be looked up"]
        wanted = ["can't decode", "names no engine", "No such file", "is no regular file"]
        assert [next(words for words in wanted if words in cause) for cause in causes] == wanted
        assert not fleet.router.failed.is_set()


def link_of(fleet: Fleet, engine: Engine) -> EngineLink:
    return fleet.router.fleet.links[engine.address]


async def test_a_router_asks_all_engines_at_once_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers decides, however many do not."""
    asked, describe = 0, engine_link.describe

    async def never_or(address: str, security: Security) -> pb.GetEngineResponse:
        nonlocal asked
        asked += 1
        if "silent" in address:
            await asyncio.Event().wait()
        return await describe(address, security)

    monkeypatch.setattr(process, "describe", never_or)
    silent = [f"unix:{tmp_path}/silent-{number}" for number in range(20)]
    engines = ",".join([*silent, f"unix:{tmp_path}/engine-0/scheduler"])
    async with run_fleet(tmp_path, 1, engines=engines) as fleet:
        output = await generate(fleet.stub, greedy_request(prompt_of(20), 4))
        assert len(output.token_ids) == 4
    assert asked == 21


async def test_a_router_for_one_model_passes_over_engines_of_another(tmp_path: Path) -> None:
    other = FakeExecutor()
    other.model_name = "another"
    (tmp_path / "other").mkdir()
    async with run_engine(tmp_path / "other", other) as wrong:
        engines = f"{wrong.address},unix:{tmp_path}/engine-0/scheduler"
        with capture_logs() as logs:
            async with run_fleet(tmp_path, 1, engines=engines, model=MODEL) as fleet:
                output = await generate(fleet.stub, greedy_request(prompt_of(20), 4))
                assert len(output.token_ids) == 4
                async with asyncio.timeout(patience(20)):
                    while fleet.metric("engines", state="other model") != 1:
                        await asyncio.sleep(0.01)
                assert fleet.metric("engines", state="away") == 0
        assert not wrong.executor.steps
        said = [line for line in logs if line["log_level"] == "warning" and "another model" in line.get("cause", "")]
        assert [line["address"] for line in said] == [wrong.address]


@pytest.mark.parametrize("engines", ["file://engines", "dns:///engines", "engines", " , ", "a:1,a:1"])
def test_engines_that_nobody_could_find_are_refused_with_the_setting(engines: str) -> None:
    with pytest.raises(SettingsError, match=r"^KVKEEP_ROUTER_ENGINES: "):
        load(RouterSettings, {"KVKEEP_ROUTER_ENGINES": engines})
