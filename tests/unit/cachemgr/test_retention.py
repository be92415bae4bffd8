"""Wishes: which are refused, which block they reach, and how they order what is lost."""

import pytest

from cachemgr.errors import InvalidField
from cachemgr.retention.priority import Wish, Wishes, check
from cachemgr.types import Retention, RetentionRange
from tests.support.in_process_manager import World, wish


def ranges(*wishes):
    return Retention(tuple(RetentionRange(*wish) for wish in wishes))


@pytest.mark.parametrize(
    ("retention", "field"),
    [
        (ranges((0, 4, 101)), "retention.ranges[0].retention_priority"),
        (ranges((0, 4, -1)), "retention.ranges[0].retention_priority"),
        (Retention((), 101), "retention.decode_retention_priority"),
        (Retention((), -1), "retention.decode_retention_priority"),
        (ranges((0, 4, 1, 0.0)), "retention.ranges[0].retention_duration"),
        (ranges((0, 4, 1, -1.0)), "retention.ranges[0].retention_duration"),
        (Retention((), 1, 0.0), "retention.decode_retention_duration"),
        (Retention((), None, 1.0), "retention.decode_retention_duration"),
        (ranges((-1, 4, 1)), "retention.ranges[0].start"),
        (ranges((0, 4, 1), (8, 8, 1)), "retention.ranges[1].end"),
        (ranges((0, 64, 1), (64, 32, 1)), "retention.ranges[1].end"),
        (ranges((0, 64, 1), (30, 128, 1)), "retention.ranges[1].start"),
        (ranges((30, 128, 1), (0, 64, 1)), "retention.ranges[0].start"),
        (ranges((0, None, 1), (64, 128, 1)), "retention.ranges[0].end"),
    ],
)
def test_a_wish_that_means_nothing_is_refused_with_its_field(retention, field):
    with pytest.raises(InvalidField) as refused:
        check(retention)
    assert list(refused.value.fields) == [field]


@pytest.mark.parametrize(
    ("retention", "block_size", "length", "expected"),
    [
        (ranges((0, 64, 80), (64, 128, 50)), 64, 256, [80, 50, None, None]),
        (ranges((0, 63, 80), (63, 127, 30)), 32, 127, [80, 80, 30, 30]),
        (ranges((0, 1, 80), (1, 2, 5)), 32, 128, [80, None, None, None]),
        (ranges((0, 128, 80)), 256, 192, [80]),
        (ranges((0, 65, 80), (65, 129, 30)), 64, 192, [80, 80, 30]),
        (ranges((64, None, 50), (0, 10, 80)), 32, 128, [80, None, 50, 50]),
    ],
)
def test_a_block_takes_the_range_of_its_first_token(retention, block_size, length, expected):
    check(retention)
    wishes = Wishes(retention, length, "request/a")
    found = [wishes.at(position) for position in range(0, length, block_size)]
    assert [None if wish is None else wish.priority for wish in found] == expected


def test_generated_blocks_take_the_decode_wish_and_open_ranges_end_with_the_prompt():
    wishes = Wishes(Retention((RetentionRange(0, None, 80, 5.0),), 20, 7.0), 8, "session/s")
    prompt, decode = Wish("session/s", 80, 5.0), Wish("session/s", 20, 7.0)
    assert [wishes.at(position) for position in (0, 4, 8, 12)] == [prompt, prompt, decode, decode]
    assert Wishes(ranges((0, None, 80)), 8, "request/a").at(8) is None


def priorities(world):
    return {view.slot: view.priority for _, view in world.manager.queries.blocks("e/0")}


def test_a_block_without_a_wish_has_priority_35():
    world = World()
    world.cache([1, 2, 3, 4, 5])
    assert set(priorities(world).values()) == {35}


def test_a_wish_below_35_counts_on_a_block_without_a_wish():
    world = World()
    world.cache([1, 2, 3, 4, 5])
    world.cache([1, 2, 3, 4, 5], retention=wish(10))
    assert priorities(world)[1] == 10


def test_a_smaller_wish_of_another_request_lowers_nothing_and_no_wish_neither():
    world = World()
    world.cache([1, 2, 3, 4, 5], retention=wish(50))
    world.cache([1, 2, 3, 4, 5], retention=wish(10))
    world.cache([1, 2, 3, 4, 5])
    assert priorities(world)[1] == 50
    world.cache([1, 2, 3, 4, 5], retention=wish(90))
    assert priorities(world)[1] == 90
    world.check()


def test_lower_priorities_are_lost_first():
    world = World(4)
    a = Retention((RetentionRange(0, 4, 90), RetentionRange(4, 8, 10)), 20)
    world.cache(list(range(8)), retention=a)
    world.cache(list(range(8, 16)))
    world.cache(list(range(16, 24)), retention=Retention((RetentionRange(0, None, 20),), 20))
    world.check()
    assert world.cache(list(range(8, 16))).cached_tokens == 4
    assert world.free == 4
    assert world.cached_tokens(list(range(8))) == 4
    assert world.cached_tokens(list(range(16, 24))) == 0


def test_a_parent_of_low_priority_stays_as_long_as_its_child_of_high_priority():
    world = World(4)
    world.cache(list(range(8)), retention=ranges((0, 4, 0), (4, 8, 90)))
    world.cache(list(range(20, 28)), retention=wish(50))
    world.cache([100, 101, 102, 103, 104])
    # Both blocks of the second are gone before either of the first.
    assert world.cached_tokens(list(range(20, 28))) == 0
    world.finish("q4")
    world.check()
    assert world.cached_tokens([*range(8), 0]) == 8
