"""Limits are searched by doubling and bisecting."""

from collections.abc import Awaitable, Callable

import pytest

from kvctl.measure.limit_search import Ending, Round, best, double, double_and_bisect


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
