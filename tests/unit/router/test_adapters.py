"""Adapters behind a router: requests go to the engines that have them."""

import asyncio
from pathlib import Path

import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from scheduler.router import process
from tests.support.generation import generate, generate_samples, greedy_request
from tests.support.patience import patience
from tests.support.scheduler.fleet import Engine, Fleet, run_fleet
from tests.support.scheduler.http import client, parent, serve
from tests.support.scheduler.stack import prompt_of, refusal


async def load(engine: Engine, name: str, path: str = "a folder") -> int:
    request = pb.LoadAdapterRequest(name=name, path=path)
    return (await engine.scheduler.service.admin.LoadAdapter(request)).adapter.adapter_id


async def known(fleet: Fleet, *adapters: list[str]) -> None:
    """Waits until the router knows the adapters of each engine."""
    async with asyncio.timeout(patience(20)):
        while [sorted(link.adapters) for link in fleet.router.fleet.links.values()] != list(adapters):
            await asyncio.sleep(0.01)


def asking(name: str, seed: int, count: int = 8, **fields: object) -> pb.StreamGenerateRequest:
    return greedy_request(prompt_of(21, seed), count, model=name, **fields)


async def test_requests_for_an_adapter_go_where_it_is_loaded(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        first, second = fleet.engines
        both = await load(first, "both")
        assert await load(second, "both") == both
        one = await load(second, "one", "another folder")
        await known(fleet, ["both"], ["both", "one"])
        outputs = await asyncio.gather(*[generate(fleet.stub, asking("one", seed)) for seed in range(4)])
        expected = [first.executor.expected(prompt_of(21, seed), 8, adapter_id=one) for seed in range(4)]
        assert [output.token_ids for output in outputs] == expected
        assert (bool(first.executor.steps), bool(second.executor.steps)) == (False, True)
        await asyncio.gather(*[generate(fleet.stub, asking("both", seed)) for seed in range(4)])
        assert first.executor.steps
        [*samples] = await generate_samples(fleet.stub, asking("one", 9, n=3))
        assert len({tuple(sample.token_ids) for sample in samples}) == 1
        error = await refusal(generate(fleet.stub, asking("none", 1)))
        assert (error.reason, error.message) == ("MODEL_NOT_FOUND", "the models here are 'fake' and 'both' and 'one'")
        with pytest.raises(ServiceError) as caught:
            await fleet.router.service.admin.LoadAdapter(pb.LoadAdapterRequest(name="x", path="y"))
        assert caught.value.reason == "LOADED_ELSEWHERE"


async def test_a_prompt_is_expected_to_be_cached_under_its_adapter_alone(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        for engine in fleet.engines:
            await load(engine, "sql")
        await known(fleet, ["sql"], ["sql"])
        await fleet.knows(2)
        for name, cached in (("", 0), ("sql", 0), ("sql", 20), ("", 20)):
            before = fleet.metric("expected_cached_tokens_total")
            output = await generate(fleet.stub, asking(name, 1, count=1))
            assert output.usage.cached_tokens == cached
            assert fleet.metric("expected_cached_tokens_total") - before == cached


async def test_of_two_engines_with_other_content_under_a_name_one_content_is_served(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        identities = [await load(engine, "sql", f"folder {n}") for n, engine in enumerate(fleet.engines)]
        await known(fleet, ["sql"], ["sql"])
        outputs = await asyncio.gather(*[generate(fleet.stub, asking("sql", 1)) for _ in range(4)])
        expected = fleet.engines[0].executor.expected
        possible = [expected(prompt_of(21, 1), 8, adapter_id=identity) for identity in identities]
        assert outputs[0].token_ids in possible
        assert all(output.token_ids == outputs[0].token_ids for output in outputs)


async def test_a_stream_continues_on_another_engine_that_has_its_adapter(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, count=3, policy="round-robin") as fleet:
        for engine in fleet.engines[1:]:
            identity = await load(engine, "sql")
        await known(fleet, [], ["sql"], ["sql"])
        for engine in fleet.engines:
            engine.executor.step_seconds = 0.01
        begun = [asyncio.Event() for _ in range(4)]
        running = [
            asyncio.create_task(generate(fleet.stub, asking("sql", seed, 60), begun=event))
            for seed, event in enumerate(begun)
        ]
        await asyncio.gather(*[event.wait() for event in begun])
        await fleet.engines[1].kill()
        expected = fleet.engines[0].executor.expected
        for seed, task in enumerate(running):
            assert (await task).token_ids == expected(prompt_of(21, seed), 60, adapter_id=identity)
        assert not fleet.engines[0].executor.steps


async def test_a_stream_whose_adapter_left_with_its_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOOKUP_SECONDS", 0.02)
    monkeypatch.setattr(process, "WATCH_SECONDS", 0.02)
    listed = tmp_path / "engines"
    listed.write_text("\n".join(f"unix:{tmp_path}/engine-{number}/scheduler" for number in range(2)))
    async with run_fleet(tmp_path, engines=f"file://{listed}") as fleet:
        await load(fleet.engines[1], "sql")
        await known(fleet, [], ["sql"])
        fleet.engines[1].executor.step_seconds = 0.01
        begun = asyncio.Event()
        running = asyncio.create_task(refusal(generate(fleet.stub, asking("sql", 1, 200), begun=begun)))
        await begun.wait()
        await fleet.engines[1].kill()
        # Until the address of the engine is gone, the engine may return with its adapter, so the request waits.
        listed.write_text(fleet.engines[0].address)
        assert (await running).reason == "ADAPTER_LOST"


async def test_the_models_of_a_fleet_are_those_of_its_engines(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        await load(fleet.engines[0], "a")
        await load(fleet.engines[1], "b")
        await known(fleet, ["a"], ["b"])
        async with serve(fleet.router.service) as address, client(address) as caller:
            models = [(model.id, parent(model)) async for model in caller.models.list()]
            assert models == [("fake", None), ("a", "fake"), ("b", "fake")]
            await fleet.engines[1].scheduler.service.admin.UnloadAdapter(pb.UnloadAdapterRequest(name="b"))
            await known(fleet, ["a"], [])
            assert [model.id async for model in caller.models.list()] == ["fake", "a"]
