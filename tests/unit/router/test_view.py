"""The view of the caches: against a model of any order of changes, and against real cache managers."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protos.kvcache.v1 import kvcache_pb2 as pb
from scheduler.router.score import Match
from scheduler.router.view import CacheView, Generation
from tests.support.generation import generate, greedy_request
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.stack import prompt_of

KEYS = range(1, 9)
EXECUTORS = ("a", "b", "c")
SHARDS = {"a": "one", "b": "one", "c": "two"}


def registered(name: str, epoch: int = 1) -> pb.CacheChange:
    pools = [pb.PoolSpec(group=0, num_blocks=8, attention_window=4), pb.PoolSpec(group=1, num_blocks=8)]
    executor = pb.Executor(executor_id=name, executor_epoch=epoch, model_fingerprint=b"m", block_size=4, pools=pools)
    return pb.CacheChange(registered=executor)


def blocks(name: str, tier: int, keys: list[int], group: int = 1) -> pb.CacheChange:
    return pb.CacheChange(blocks=pb.BlockKeys(pool_id=f"{name}/{group}", tier=tier, keys=keys))


_changes = st.one_of(
    st.tuples(st.just("blocks"), st.sampled_from(EXECUTORS), st.integers(0, 3), st.lists(st.sampled_from(KEYS))),
    st.tuples(st.just("lost"), st.sampled_from(EXECUTORS)),
    st.tuples(st.just("registered"), st.sampled_from(EXECUTORS)),
    st.tuples(st.just("snapshot"), st.sampled_from(["one", "two"])),
    st.tuples(st.just("sweep")),
)


def expected(tiers: dict[int, int], keys: list[int]) -> Match:
    found = list(itertools.takewhile(bool, (tiers.get(key, 0) for key in keys)))
    return Match(found.count(1), found.count(2), found.count(3))


@given(st.lists(_changes, max_size=40), st.lists(st.sampled_from(KEYS), max_size=8))
def test_the_view_is_what_the_changes_come_to(changes: list[tuple[Any, ...]], asked: list[int]) -> None:
    view, generations = CacheView(), {shard: Generation(shard) for shard in ("one", "two")}
    model: dict[str, dict[int, int]] = {}
    for generation in generations.values():
        view.show(generation)
    for kind, *rest in changes:
        if kind == "snapshot":
            # A new snapshot has the blocks of the model; until it is complete the older one counts.
            generation = Generation(rest[0])
            for name in [name for name in model if SHARDS[name] == rest[0]]:
                view.apply(generation, [registered(name)])
                by_tier = [
                    blocks(name, tier, [key for key in model[name] if model[name][key] == tier]) for tier in (1, 2, 3)
                ]
                view.apply(generation, by_tier)
            assert view.match(EXECUTORS, asked) == _matches(model, asked)
            view.show(generation)
            generations[rest[0]] = generation
        elif kind == "sweep":
            asyncio.run(view.sweep())
        else:
            name, *fields = rest
            generation = generations[SHARDS[name]]
            if kind == "registered":
                model.setdefault(name, {})
                view.apply(generation, [registered(name)])
            elif kind == "lost":
                model.pop(name, None)
                view.apply(generation, [pb.CacheChange(lost=pb.Executor(executor_id=name))])
            else:
                tier, keys = fields
                # Blocks of the group with a window do not count.
                view.apply(generation, [blocks(name, tier, keys), blocks(name, 1, keys, group=0)])
                for key in keys if name in model else ():
                    model[name][key] = tier
        assert view.match(EXECUTORS, asked) == _matches(model, asked)
        assert set(view.executors) == set(model)


def _matches(model: dict[str, dict[int, int]], asked: list[int]) -> dict[str, Match]:
    found = {name: expected(tiers, asked) for name, tiers in model.items()}
    return {name: match for name, match in found.items() if match.blocks}


def test_what_is_dropped_leaves_no_block_behind() -> None:
    view, generation = CacheView(), Generation("one")
    view.apply(generation, [registered("a"), registered("b"), blocks("a", 1, [1, 2, 3]), blocks("b", 2, [3])])
    view.show(generation)
    view.apply(generation, [pb.CacheChange(lost=pb.Executor(executor_id="a"))])
    assert len(view) == 3
    asyncio.run(view.sweep())
    assert len(view) == 1
    view.apply(generation, [registered("c")])
    assert view.match(["c"], [3]) == {}


async def test_prompts_go_where_their_prefix_is_and_nothing_is_regretted(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        async with asyncio.timeout(10):
            while len(fleet.router.view.executors) < 2:
                await asyncio.sleep(0.01)
        for engine in fleet.engines:
            engine.executor.token_seconds = 0.01
        prompts = [prompt_of(41, seed) for seed in range(4)]
        for prompt in prompts:
            await generate(fleet.stub, greedy_request(prompt, 4))
        # Cold prompts go to both engines in turn.
        assert [len(engine.manager.admissions) for engine in fleet.engines] == [2, 2]
        # Of each request the last token is not computed; its last block may not be full.
        await fleet.views(4 * -(-(41 + 4 - 1) // fleet.engines[0].executor.block_size))
        before = [len(engine.manager.admissions) for engine in fleet.engines]
        again = [await generate(fleet.stub, greedy_request(prompt, 4)) for prompt in prompts]
        assert [output.usage.cached_tokens for output in again] == [40] * 4
        assert [len(engine.manager.admissions) - n for engine, n in zip(fleet.engines, before, strict=True)] == [2, 2]
        assert fleet.metric("expected_cached_tokens_total") == 160
        assert fleet.metric("regret_tokens_total") == 0
