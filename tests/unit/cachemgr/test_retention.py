"""Wishes: which are refused, which block they reach, and how they order what is lost."""

import pytest

from cachemgr.retention.priority import Wish, Wishes, check
from cachemgr.types import Retention, RetentionRange
from protos.errors import InvalidField


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


def test_generated_blocks_take_the_decode_wish_and_open_ranges_end_with_the_prompt():
    wishes = Wishes(Retention((RetentionRange(0, None, 80, 5.0),), 20, 7.0), 8, "session/s")
    prompt, decode = Wish("session/s", 80, 5.0), Wish("session/s", 20, 7.0)
    assert [wishes.at(position) for position in (0, 4, 8, 12)] == [prompt, prompt, decode, decode]
    assert Wishes(ranges((0, None, 80)), 8, "request/a").at(8) is None
