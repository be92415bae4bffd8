"""Receipts: retention granted, clipped or rejected, and the reasons."""

import dataclasses

import pytest

from cachemgr.types import Outcome, Retention, RetentionRange
from tests.support.in_process_manager import CONFIG, World, retain

PROMPT = list(range(10, 19))
BOUNDED = dataclasses.replace(CONFIG, max_retention_priority=60, max_retention_seconds=5.0)


def receipts(*ranges: RetentionRange, config=CONFIG, decode: tuple = (), **options: object):
    world = World(8, config=config)
    admission = world.run(PROMPT, "a", retention=Retention(ranges, *decode), **options)
    world.check()
    return [tuple(receipt) for receipt in admission.receipts]


def test_a_request_without_retention_has_no_receipt():
    assert receipts() == []


def test_each_range_has_a_receipt_in_the_order_of_the_request():
    found = receipts(RetentionRange(4, None, 80, 9.0), RetentionRange(0, 4, 20), decode=(50, 7.0))
    assert found == [
        ("ranges[0]", Outcome.GRANTED, "", 80, 9.0, 2),
        ("ranges[1]", Outcome.GRANTED, "", 20, None, 1),
        ("decode", Outcome.GRANTED, "", 50, 7.0, 0),
    ]


@pytest.mark.parametrize(
    ("start", "end", "outcome", "reason", "blocks"),
    [
        (9, 12, Outcome.REJECTED, "after the prompt", 0),
        (50, None, Outcome.REJECTED, "after the prompt", 0),
        (1, 4, Outcome.REJECTED, "no block of 4 tokens begins in it", 0),
        (1, 5, Outcome.GRANTED, "", 1),
        (0, 9, Outcome.GRANTED, "", 3),
        (0, 10, Outcome.CLIPPED, "ends with the prompt", 3),
        (5, 12, Outcome.CLIPPED, "ends with the prompt", 1),
    ],
)
def test_a_range_counts_the_blocks_that_begin_in_it(start, end, outcome, reason, blocks):
    ((_, found, why, _, _, count),) = receipts(RetentionRange(start, end, 80))
    assert (found, count) == (outcome, blocks)
    assert reason in why
    assert bool(why) == bool(reason)


@pytest.mark.parametrize(
    ("priority", "duration", "outcome", "granted"),
    [
        (60, 5.0, Outcome.GRANTED, (60, 5.0)),
        (61, 5.0, Outcome.CLIPPED, (60, 5.0)),
        (60, 5.1, Outcome.CLIPPED, (60, 5.0)),
        (60, None, Outcome.CLIPPED, (60, 5.0)),
        (100, 100.0, Outcome.CLIPPED, (60, 5.0)),
    ],
)
def test_requests_beyond_the_operators_bounds_are_clipped_to_them(priority, duration, outcome, granted):
    for found in receipts(RetentionRange(0, None, priority, duration), decode=(priority, duration), config=BOUNDED):
        assert (found[1], found[3:5]) == (outcome, granted)
        assert bool(found[2]) == (outcome is Outcome.CLIPPED)


def test_blocks_have_the_leases_of_the_receipt():
    world = World(8, config=BOUNDED)
    world.cache(PROMPT, retention=retain(100))
    assert {(lease.priority, lease.remaining) for _, _, lease in filter(None, world.queries.leases("e/0", ""))} == {
        (60, 5.0)
    }
    world.now = 5.0
    world.manager.expire()
    assert list(filter(None, world.queries.leases("e/0", ""))) == []


def test_a_request_that_stores_nothing_is_granted_nothing():
    found = receipts(RetentionRange(0, None, 80), decode=(50,), no_store=True)
    assert [(one[1], one[5]) for one in found] == [(Outcome.REJECTED, 0)] * 2
    assert all("leaves nothing" in one[2] for one in found)


def test_only_the_prompt_counts_where_a_request_continues_an_earlier_attempt():
    ((_, outcome, _, _, _, blocks),) = receipts(RetentionRange(0, None, 80), num_prompt_tokens=4)
    assert (outcome, blocks) == (Outcome.GRANTED, 1)
