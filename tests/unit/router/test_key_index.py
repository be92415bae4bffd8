"""Routing by the index in Redis, while a cache manager's events do not come."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protos.rpc.settings import SettingsError, load
from scheduler.router import key_index
from scheduler.router.settings import RouterSettings
from tests.support.generation import generate, greedy_request
from tests.support.local_redis import LocalRedis
from tests.support.patience import patience
from tests.support.scheduler.fleet import Fleet, run_fleet, run_router
from tests.support.scheduler.stack import prompt_of

PROMPTS = [prompt_of(41, seed) for seed in range(4)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalRedis]:
    found = LocalRedis(tmp_path / "redis")
    yield found
    found.stop()


@contextlib.asynccontextmanager
async def written(fleet: Fleet, url: str) -> AsyncIterator[None]:
    """The index of all engines' caches is in Redis."""
    indexes = [engine.manager.key_index(url) for engine in fleet.engines]
    tasks = [asyncio.create_task(index.run()) for index in indexes]
    try:
        async with asyncio.timeout(patience(20)):
            while not all(index.is_current for index in indexes):
                await asyncio.sleep(0.01)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for index in indexes:
            await index.close()


@contextlib.asynccontextmanager
async def cold(tmp_path: Path, url: str) -> AsyncIterator[Fleet]:
    """A router that has just started, without events, before two engines that have two of PROMPTS each."""
    async with run_fleet(tmp_path, policy="round-robin") as warm:
        for number, prompt in enumerate(PROMPTS):
            engine = warm.engines[number // 2]
            engine.executor.token_seconds = 0.01
            await generate(engine.stub, greedy_request(prompt, 4))
            engine.manager.hides_events = True
        async with written(warm, url):
            (tmp_path / "cold").mkdir()
            async with run_router(tmp_path / "cold", warm.engines, redis_url=url) as fleet:
                async with asyncio.timeout(patience(20)):
                    while len(fleet.router._index.executors) < 2:
                        await asyncio.sleep(0.01)
                yield fleet


async def admissions(fleet: Fleet, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Runs prompts one after the other: how many each engine got of each, and the cached tokens of each."""
    engines, tokens = [], []
    for prompt in prompts:
        before = [len(engine.manager.admissions) for engine in fleet.engines]
        output = await generate(fleet.stub, greedy_request(prompt, 4))
        assert len(output.token_ids) == 4
        tokens.append(output.usage.cached_tokens)
        engines.append([len(one.manager.admissions) - n for one, n in zip(fleet.engines, before, strict=True)])
    return engines, tokens


async def test_prompts_go_where_redis_has_their_blocks_while_no_view_is_complete(
    tmp_path: Path, server: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others may have the processor.
    monkeypatch.setattr(key_index, "LOOKUP_SECONDS", 20)
    async with cold(tmp_path, server.url) as fleet:
        # In another order than round robin would have it.
        engines, tokens = await admissions(fleet, [PROMPTS[at] for at in (3, 0, 1, 2)])
        assert engines == [[0, 1], [1, 0], [1, 0], [0, 1]]
        assert tokens == [40] * 4
        assert not fleet.router.view.executors
        assert fleet.metric("index_lookups_total", result="found") == 4
        assert fleet.metric("expected_cached_tokens_total") == 160
        assert fleet.metric("regret_tokens_total") == 0
        await admissions(fleet, [prompt_of(41, 9)])
        assert fleet.metric("index_lookups_total", result="nothing") == 1


async def test_a_complete_view_needs_no_index(tmp_path: Path, server: LocalRedis) -> None:
    async with cold(tmp_path, server.url) as fleet:
        for engine in fleet.engines:
            engine.manager.hides_events = False
        async with asyncio.timeout(patience(20)):
            while len(fleet.router.view.executors) < 2 or fleet.router._index.executors:
                await asyncio.sleep(0.01)
        engines, tokens = await admissions(fleet, PROMPTS)
        assert engines == [[1, 0], [1, 0], [0, 1], [0, 1]]
        assert tokens == [40] * 4
        assert not fleet.metric("index_lookups_total", result="found")


@pytest.mark.parametrize("how", ["it has ended", "it hangs"])
async def test_without_an_answer_from_redis_prompts_go_by_load(tmp_path: Path, server: LocalRedis, how: str) -> None:
    async with cold(tmp_path, server.url) as fleet:
        if how == "it hangs":
            server.signal(signal.SIGSTOP)
        else:
            server.kill()
        try:
            engines, _ = await admissions(fleet, PROMPTS)
            assert all(sum(counts) == 1 for counts in engines)
            # It is not asked again and again.
            assert fleet.metric("index_lookups_total", result="nothing") <= 1
            assert not fleet.metric("index_lookups_total", result="found")
            assert not fleet.router._index.executors
        finally:
            server.signal(signal.SIGCONT) if how == "it hangs" else server.start()
        async with asyncio.timeout(patience(20)):
            while len(fleet.router._index.executors) < 2:
                await asyncio.sleep(0.01)


async def test_a_request_that_is_cancelled_during_its_lookup_leaves_nothing(
    tmp_path: Path, server: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "LOOKUP_SECONDS", 30)
    async with cold(tmp_path, server.url) as fleet:
        server.signal(signal.SIGSTOP)
        try:
            running = asyncio.create_task(generate(fleet.stub, greedy_request(PROMPTS[0], 4)))
            async with asyncio.timeout(patience(20)):
                while fleet.router.requests.num_waiting != 1 or not fleet.router.fleet.preparing:
                    await asyncio.sleep(0.001)
                [lookup] = fleet.router.fleet.preparing.values()
                running.cancel()
                while fleet.router.requests.num_waiting or fleet.router.fleet.preparing:
                    await asyncio.sleep(0.001)
                # It does not wait for Redis any more.
                await asyncio.wait([lookup])
        finally:
            server.signal(signal.SIGCONT)
        assert lookup.cancelled()
        assert not fleet.router.fleet.on(next(iter(fleet.router.fleet.links.values())))


def test_redis_of_another_machine_needs_tls_or_a_word() -> None:
    url = "redis://:secret@10.1.2.3:6379/0"
    with pytest.raises(SettingsError, match=r"^KVKEEP_ROUTER_REDIS_URL: .* without TLS: ") as refused:
        load(RouterSettings, {"KVKEEP_ROUTER_REDIS_URL": url})
    assert "secret" not in str(refused.value)
    # The router's own variable wins over that of all processes: empty is none.
    assert not load(RouterSettings, {"KVKEEP_REDIS_URL": "redis://", "KVKEEP_ROUTER_REDIS_URL": ""}).redis_url


@pytest.mark.parametrize(("ids", "asked"), [(("a", "b"), {"a", "b"}), (("same", "same"), set())])
async def test_redis_is_not_asked_for_an_id_that_executors_of_two_shards_have(
    tmp_path: Path, ids: tuple[str, str], asked: set[str]
) -> None:
    async with run_fleet(tmp_path, executor_ids=ids) as warm:
        for engine in warm.engines:
            engine.manager.hides_events = True
        (tmp_path / "cold").mkdir()
        async with run_router(tmp_path / "cold", warm.engines) as fleet:
            await fleet.ready(2)
            assert set(fleet.router.fleet.unknown_executors()) == asked
