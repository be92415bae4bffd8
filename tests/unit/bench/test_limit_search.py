"""Limits are searched by doubling and bisecting."""

from collections.abc import Awaitable, Callable

import pytest

from bench.limit_search import Ending, Round, best, double, double_and_bisect, why_requests_wait
from protos.kvcache.v1 import kvcache_pb2


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
    used, unseen = Round(1, cache=[0.25, 0.75, 0.5]).summary(), Round(1).summary()
    assert (used["cache_mean"], used["cache_most"]) == (0.5, 0.75)
    assert (unseen["cache_mean"], unseen["cache_most"]) == (0.0, 0.0)


@pytest.mark.parametrize(("free", "ending"), [(0, Ending.EXHAUSTED), (90, Ending.BOUND)])
def test_requests_wait_for_blocks_or_for_the_scheduler(free: int, ending: Ending) -> None:
    pools = [kvcache_pb2.Pool(block_size=4, total_blocks=100, free_blocks=blocks) for blocks in (free, 100)]
    assert why_requests_wait(pools, 8) is ending
