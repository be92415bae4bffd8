"""Requests through a router: the tokens of one engine, whichever engine runs them and whatever dies meanwhile."""

import asyncio
from pathlib import Path

import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.settings import SettingsError, load
from scheduler.router import process
from scheduler.router.settings import RouterSettings
from tests.support.generation import generate, generate_samples, greedy_request
from tests.support.scheduler.fleet import run_engine, run_fleet
from tests.support.scheduler.stack import prompt_of, refusal


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


async def test_requests_wait_while_no_engine_answers_and_health_says_so(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, count=1) as fleet:
        await fleet.engines[0].kill()
        await fleet.ready(0)
        assert "no engine takes requests" in fleet.router.fleet.obstacle
        waiting = asyncio.create_task(generate(fleet.stub, greedy_request(prompt_of(8), 4)))
        async with asyncio.timeout(10):
            while fleet.router.requests.num_waiting != 1:
                await asyncio.sleep(0.01)
        waiting.cancel()
        async with asyncio.timeout(10):
            while fleet.router.requests.num_waiting:
                await asyncio.sleep(0.01)


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
        async with asyncio.timeout(10):
            while fleet.engines[0].scheduler.requests.num_running or fleet.router.requests.num_running:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
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
            # It is left out once it has gone, too: until then its requests run.
            file.write_text("\n".join(addresses[:2]))
            await asyncio.sleep(0.1)
            assert set(fleet.router.fleet.links) == set(addresses)
            await third.kill()
        await fleet.ready(2)
        async with asyncio.timeout(20):
            while set(fleet.router.fleet.links) != set(addresses[:2]):
                await asyncio.sleep(0.01)
        # Without the file the router keeps the engines that answer.
        file.unlink()
        await asyncio.sleep(0.1)
        output = await generate(fleet.stub, greedy_request(prompt_of(20), 4))
        assert len(output.token_ids) == 4


@pytest.mark.parametrize("engines", ["file://engines", "dns:///engines", "engines", " , ", "a:1,a:1"])
def test_engines_that_nobody_could_find_are_refused_with_the_setting(engines: str) -> None:
    with pytest.raises(SettingsError, match=r"^KVKEEP_ROUTER_ENGINES: "):
        load(RouterSettings, {"KVKEEP_ROUTER_ENGINES": engines})
