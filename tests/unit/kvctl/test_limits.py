"""Limits are searched by doubling and bisecting."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvctl.measure.limit_search import Checker, Ending, Load, Round, best, double, double_and_bisect
from protos.kvcache.v1 import kvcache_pb2
from protos.rpc.channel import open_channel
from protos.rpc.security import PLAIN
from tests.support.managers import Managers
from tests.support.patience import patience


def stack_that_fits(most: int) -> Callable[[int], Awaitable[Round]]:
    async def run(size: int) -> Round:
        return Round(size, ending=Ending.DONE if size <= most else Ending.EXHAUSTED)

    return run


@pytest.mark.parametrize(("most", "sizes"), [(0, [1]), (1, [1, 2]), (5, [1, 2, 4, 8]), (8, [1, 2, 4, 8, 16])])
async def test_doubling_ends_with_the_first_round_that_is_not_done(most: int, sizes: list[int]) -> None:
    assert [one.size for one in await double(stack_that_fits(most))] == sizes


@pytest.mark.parametrize("most", range(40))
async def test_bisecting_finds_the_largest_that_is_done(most: int) -> None:
    rounds = await double_and_bisect(stack_that_fits(most))
    assert best(rounds) == most
    assert min(one.size for one in rounds if one.ending is not Ending.DONE) == most + 1
    assert len({one.size for one in rounds}) == len(rounds) <= 13


def test_cache_use_is_the_mean_and_the_most_of_all_looks() -> None:
    used = Round(1, cache=[0.25, 0.75, 0.5])
    assert (used.cache_mean, used.cache_most) == (0.5, 0.75)
    assert (Round(1).cache_mean, Round(1).cache_most) == (0.0, 0.0)


async def test_all_pools_are_looked_at(tmp_path: Path) -> None:
    async with Managers(tmp_path, "").run() as client:
        await client.register()
        message = client.registration(steps_manager_epoch=client.manager_epoch)
        for number in range(59):
            message.executor_id = f"other-{number}"
            await client.manager.RegisterExecutor(message, timeout=patience(5))
        async with open_channel(client.settings.cachemgr_admin_address) as admin:
            pools = await Checker(admin, admin, Load(8, 1.0), {}, PLAIN, patience(10))._pools()
    assert len({pool.pool_id for pool in pools}) == len(pools) == 60


@pytest.mark.parametrize(("free", "ending"), [(0, Ending.EXHAUSTED), (90, Ending.BOUND)])
async def test_requests_wait_for_blocks_or_for_the_scheduler(free: int, ending: Ending) -> None:
    pools = [kvcache_pb2.Pool(block_size=4, total_blocks=100, free_blocks=blocks) for blocks in (free, 100)]
    async with open_channel("127.0.0.1:1") as nowhere:
        checker = Checker(nowhere, nowhere, Load(8, 1.0), {}, PLAIN, 1.0)
        assert checker._why_requests_wait(pools) is ending
