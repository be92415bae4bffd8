"""A trace is read as it is meant, its conversations pause as agents do, and leases are counted right."""

import itertools
import json

import pytest

from bench.driver import Driver, prompt
from bench.replay import LeaseCount, Replay, demand, upper_bound, with_pauses
from bench.trace import every_request, no_retention, retention_by_history
from bench.trace_file import read
from cachemgr.types import Retention, RetentionRange

VALID = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}


def write(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(timestamp, hash_ids, tail=100, output=3):
    length = 512 * (len(hash_ids) - 1) + tail
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": hash_ids}


@pytest.fixture
def requests(tmp_path):
    """Two conversations with one block in common; the first returns twice."""
    rows = [
        row(0, [0, 1, 2, 3]),
        row(1000, [0, 10, 11, 12]),
        row(2000, [0, 1, 2, 4, 5]),
        row(9000, [0, 1, 2, 4, 6, 7]),
    ]
    return read(write(tmp_path, *rows))


def test_a_request_has_the_tokens_of_its_ids(tmp_path):
    (request,) = read(write(tmp_path, VALID))
    assert (request.time, request.input_length, request.output_length) == (1.5, 600, 3)
    assert request.tokens().tolist() == [*range(512), *range(7 * 512, 7 * 512 + 88)]


def test_equal_ids_are_equal_tokens(requests):
    first, _, second, _ = (request.tokens() for request in requests)
    assert first[: 3 * 512] == second[: 3 * 512]
    assert first[3 * 512] != second[3 * 512]


def test_a_request_follows_the_request_whose_prompt_is_its_prefix(requests):
    assert [request.conversation for request in requests] == [1, 2, 1, 1]
    assert [request.follows for request in requests] == [False, False, True, True]


def test_a_conversation_returns_after_its_end_and_the_same_way_for_a_seed(requests):
    moved = with_pauses(requests, 3)
    assert moved == with_pauses(requests, 3) != with_pauses(requests, 4)
    assert [request.time for request in moved] == sorted(request.time for request in moved)
    first, *following = (request for request in moved if request.conversation == 1)
    assert first.time == 0
    for before, after in itertools.pairwise([first, *following]):
        assert after.time >= before.time + 0.2 + 0.01 * before.output_length


def test_prefix_hits_of_an_unbounded_pool_equal_the_bound(requests):
    found = 512 + 3 * 512 + 4 * 512
    assert upper_bound(requests) == found
    for block_size in (16, 512):
        outcome = Replay(64 * 512 // block_size, block_size).run(requests, no_retention(requests))
        assert outcome.found == found
        assert outcome.found_following == 7 * 512
        assert outcome.asked == sum(request.input_length for request in requests)
        assert not outcome.waited


def test_demand_counts_shared_blocks_once(tmp_path):
    # Both run from 0 to 1 second, with one generated block each; then one second of which only they are kept.
    requests = read(write(tmp_path, row(0, [0, 1], output=80), row(0, [0, 2], output=80)))
    mean, most = demand(requests, 1.0)
    assert most == 5 * 512
    assert mean == pytest.approx(5 * 512)


def test_retention_is_requested_for_shared_prefixes_and_returning_conversations(tmp_path):
    rows = [row(number, [0, 10 * number + 1, 10 * number + 2]) for number in range(4)]
    requests = read(write(tmp_path, *rows, row(5, [0, 1, 3])))
    *_, shared, _ = retention_by_history(requests)
    assert shared == Retention((RetentionRange(0, 512, 80),))
    requests = read(write(tmp_path, *rows, row(5, [0, 1, 2, 3]), row(6, [0, 1, 2, 3, 4])))
    assert retention_by_history(requests)[-1] == Retention((RetentionRange(512, None, 60, 600.0),))


def test_leases_of_an_endless_pool_are_all_honoured(requests):
    leases = Replay(64, 512).run(requests, every_request(requests)).leases
    assert leases.granted > 0
    # Time stands still after the last request.
    assert leases.broken == 0
    assert leases.honoured < leases.granted


class Counted:
    """A pool of 4 blocks of 16 tokens, and the outcomes of its leases."""

    def __init__(self):
        self.driver, self.count = Driver(4), LeaseCount()

    def cache(self, number, length, session=None, duration=10.0):
        retention = Retention((RetentionRange(0, None, 60, duration),)) if session else Retention()
        name = f"{number} at {self.driver.now}"
        self.driver.cache(name, prompt(number, length), session_id=session, retention=retention)
        return self.leases()

    def leases(self):
        self.count = LeaseCount()
        for event in self.driver.manager.queries.events_after(0, 1000):
            self.count.see(event)
        return self.count.granted, self.count.honoured, self.count.broken


def test_a_lease_that_ends_by_itself_is_honoured():
    pool = Counted()
    assert pool.cache(0, 32, "a") == (2, 0, 0)
    pool.driver.now = 11.0
    pool.driver.manager.expire()
    assert pool.leases() == (2, 2, 0)


def test_a_lease_renewed_by_its_session_is_honoured_and_other_leases_stay():
    pool = Counted()
    pool.cache(0, 16, "a")
    pool.driver.now = 5.0
    assert pool.cache(0, 16, "a")[:2] == (2, 1)
    assert pool.cache(0, 16, "b")[:2] == (3, 1)


def test_a_lease_on_an_evicted_block_is_broken():
    pool = Counted()
    pool.cache(0, 32, "a")
    assert pool.cache(1, 64) == (2, 0, 2)


def test_a_lease_on_a_block_replaced_by_a_longer_block_is_honoured():
    pool = Counted()
    pool.driver.cache(
        "short", prompt(0, 32)[:8], session_id="a", retention=Retention((RetentionRange(0, None, 60, 10.0),))
    )
    pool.driver.cache("long", prompt(0, 32)[:12], session_id="a")
    granted, honoured, broken = pool.leases()
    assert (honoured, broken) == (1, 0)
    assert granted == 2
