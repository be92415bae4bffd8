"""The view of the caches: against a model of any order of changes, and against real cache managers."""

import asyncio
import itertools
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.kvcache.v1 import kvcache_pb2 as pb
from scheduler.router.expected_seconds import Match
from scheduler.router.view import CacheView, Owner, ShardView
from tests.support.cache_view import assert_nothing_leaks
from tests.support.generation import generate, greedy_request
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.stack import prompt_of

KEYS = range(1, 9)
# Two shards have an executor with the same id.
OWNERS = (Owner("one", "a"), Owner("one", "b"), Owner("two", "a"))


def registered(name: str, epoch: int = 1) -> pb.CacheChange:
    pools = [pb.PoolSpec(group=0, num_blocks=8, attention_window=4), pb.PoolSpec(group=1, num_blocks=8)]
    executor = pb.Executor(executor_id=name, executor_epoch=epoch, model_fingerprint=b"m", block_size=4, pools=pools)
    return pb.CacheChange(registered=executor)


def blocks(name: str, tier: int, keys: list[int], group: int = 1) -> pb.CacheChange:
    return pb.CacheChange(blocks=pb.BlockKeys(pool_id=f"{name}/{group}", tier=tier, keys=keys))


_changes = st.one_of(
    st.tuples(st.just("blocks"), st.sampled_from(OWNERS), st.integers(0, 3), st.lists(st.sampled_from(KEYS))),
    st.tuples(st.just("lost"), st.sampled_from(OWNERS)),
    st.tuples(st.just("registered"), st.sampled_from(OWNERS)),
    st.tuples(st.just("snapshot"), st.sampled_from(["one", "two"])),
    st.tuples(st.just("sweep")),
)


def expected(tiers: dict[int, int], keys: list[int]) -> Match:
    found = list(itertools.takewhile(bool, (tiers.get(key, 0) for key in keys)))
    return Match(found.count(1), found.count(2), found.count(3))


@given(st.lists(_changes, max_size=40), st.lists(st.sampled_from(KEYS), max_size=8))
def test_the_view_is_what_the_changes_come_to(changes: list[tuple[Any, ...]], asked: list[int]) -> None:
    view, shard_views = CacheView(), {shard: ShardView(shard) for shard in ("one", "two")}
    model: dict[Owner, dict[int, int]] = {}
    for shard_view in shard_views.values():
        view.show(shard_view)
    for kind, *rest in changes:
        if kind == "snapshot":
            # A new snapshot has the blocks of the model; until it is complete the older one counts.
            shard_view = ShardView(rest[0])
            for owner in [owner for owner in model if owner.shard == rest[0]]:
                name, known = owner.executor_id, model[owner]
                view.apply(shard_view, [registered(name)])
                by_tier = [blocks(name, tier, [key for key in known if known[key] == tier]) for tier in (1, 2, 3)]
                view.apply(shard_view, by_tier)
            assert view.match(OWNERS, array("Q", asked)) == _matches(model, asked)
            view.show(shard_view)
            shard_views[rest[0]] = shard_view
        elif kind == "sweep":
            asyncio.run(view.sweep())
        else:
            owner, *fields = rest
            name, shard_view = owner.executor_id, shard_views[owner.shard]
            if kind == "registered":
                model.setdefault(owner, {})
                view.apply(shard_view, [registered(name)])
            elif kind == "lost":
                model.pop(owner, None)
                view.apply(shard_view, [pb.CacheChange(lost=pb.Executor(executor_id=name))])
            else:
                tier, keys = fields
                # Blocks of the group with a window do not count.
                view.apply(shard_view, [blocks(name, tier, keys), blocks(name, 1, keys, group=0)])
                for key in keys if owner in model else ():
                    model[owner][key] = tier
        assert view.match(OWNERS, array("Q", asked)) == _matches(model, asked)
        assert set(view.executors) == set(model)
    asyncio.run(view.sweep())
    assert_nothing_leaks(view)


def _matches(model: dict[Owner, dict[int, int]], asked: list[int]) -> dict[Owner, Match]:
    found = {owner: expected(tiers, asked) for owner, tiers in model.items()}
    return {owner: match for owner, match in found.items() if match.blocks}


def test_what_is_dropped_leaves_no_block_behind() -> None:
    view, shard_view = CacheView(), ShardView("one")
    view.apply(shard_view, [registered("a"), registered("b"), blocks("a", 1, [1, 2, 3]), blocks("b", 2, [3])])
    view.show(shard_view)
    view.apply(shard_view, [pb.CacheChange(lost=pb.Executor(executor_id="a"))])
    assert len(view) == 3
    asyncio.run(view.sweep())
    assert len(view) == 1
    view.apply(shard_view, [registered("c")])
    assert view.match([Owner("one", "c")], array("Q", [3])) == {}
    assert_nothing_leaks(view)


def test_a_tier_of_a_later_version_is_none_and_leaves_other_executors_alone() -> None:
    view, shard_view = CacheView(), ShardView("one")
    view.apply(shard_view, [registered("a"), registered("b"), blocks("a", 1, [1, 2])])
    view.show(shard_view)
    view.apply(shard_view, [blocks("a", 4, [1, 2])])
    assert view.match([Owner("one", "a"), Owner("one", "b")], array("Q", [1, 2])) == {}
    assert len(view) == 0


def _stored_blocks(prompt: int, output: int, block_size: int) -> int:
    """Blocks that a request leaves, the last one perhaps not full. The last token is not computed."""
    return -(-(prompt + output - 1) // block_size)


@pytest.mark.parametrize("executor_ids", [("executor-0", "executor-1"), ("same", "same")])
async def test_prompts_go_where_their_prefix_is_and_nothing_is_regretted(
    tmp_path: Path, executor_ids: tuple[str, str]
) -> None:
    """Each engine has a separate cache manager, so that executors may have equal ids."""
    async with run_fleet(tmp_path, executor_ids=executor_ids) as fleet:
        await fleet.knows(2)
        for engine in fleet.engines:
            engine.executor.token_seconds = 0.01
        prompts = [prompt_of(41, seed) for seed in range(4)]
        for prompt in prompts:
            await generate(fleet.stub, greedy_request(prompt, 4))
        # Cold prompts go to both engines in turn.
        assert [len(engine.manager.admissions) for engine in fleet.engines] == [2, 2]
        await fleet.views(4 * _stored_blocks(41, 4, fleet.engines[0].executor.block_size))
        before = [len(engine.manager.admissions) for engine in fleet.engines]
        again = [await generate(fleet.stub, greedy_request(prompt, 4)) for prompt in prompts]
        assert [output.usage.cached_tokens for output in again] == [40] * 4
        assert [len(engine.manager.admissions) - n for engine, n in zip(fleet.engines, before, strict=True)] == [2, 2]
        assert fleet.metric("expected_cached_tokens_total") == 160
        assert fleet.metric("regret_tokens_total") == 0


@pytest.mark.parametrize(("fingerprint", "block_size"), [(b"g" * 32, 4), (b"f" * 32, 8)])
async def test_prompts_go_where_their_prefix_is_among_engines_whose_keys_differ(
    tmp_path: Path, fingerprint: bytes, block_size: int
) -> None:
    executors = [FakeExecutor(), FakeExecutor(block_size=block_size)]
    executors[1].model_fingerprint = fingerprint
    async with run_fleet(tmp_path, executors=executors) as fleet:
        await fleet.knows(2)
        prompts = [prompt_of(41, seed) for seed in range(4)]
        for number, prompt in enumerate(prompts):
            executors[number % 2].token_seconds = 0.01
            await generate(fleet.engines[number % 2].stub, greedy_request(prompt, 4))
        await fleet.views(2 * sum(_stored_blocks(41, 4, executor.block_size) for executor in executors))
        before = [len(engine.manager.admissions) for engine in fleet.engines]
        for number, prompt in enumerate(prompts):
            output = await generate(fleet.stub, greedy_request(prompt, 4))
            assert output.usage.cached_tokens == 40
            before[number % 2] += 1
            assert [len(engine.manager.admissions) for engine in fleet.engines] == before
        assert fleet.metric("expected_cached_tokens_total") == 160
        assert fleet.metric("regret_tokens_total") == 0
