"""The measurements of a router's view run, and the needs of a large fleet follow from its costs."""

from collections.abc import Iterator

import pytest

from bench.router import capacity, decision, events, made, size
from bench.router.capacity import Costs, Size
from bench.router.made import Caches
from bench.scale.row import Row
from protos.kvcache.v1 import kvcache_pb2 as pb

COSTS = Costs(
    block_bytes=20,
    copies=3,
    decision_engine=5,
    decision_block=0.2,
    hashing=0.3,
    event=0.5,
    event_bytes=8,
    snapshot_block=0.5,
    commands=0.1,
    indexed=1.5,
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (capacity, decision):
        monkeypatch.setattr(module, "PROMPTS", 1)
    monkeypatch.setattr(decision, "ROUNDS", 1)
    monkeypatch.setattr(decision, "CASES", (decision.CASES[0], decision.CASES[3]))
    monkeypatch.setattr(events, "KEYS_OF_A_MESSAGE", 10)


def values(rows: Iterator[Row]) -> dict[str, float]:
    found = [(row.name, row.value) for row in rows]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_decisions_are_measured() -> None:
    found = values(decision.rows(1_000))
    for name, *_ in decision.CASES:
        assert found[f"{made.PROMPT_TOKENS:,} tokens, {name}: p50"] > 0


@pytest.mark.parametrize("layout", size.LAYOUTS)
def test_each_layout_fills_the_view(layout: str) -> None:
    caches = Caches(10, 2)
    size.LAYOUTS[layout][0](caches, 1_000)
    assert len(caches.view) == 1_000


def test_a_view_with_events_and_snapshots_is_measured() -> None:
    stored = pb.BlockKeys(pool_id="e1/0", tier=1, keys=range(1, 11))
    messages = [
        pb.WatchEventsResponse(last_event_number=0, snapshot_end=True),
        pb.WatchEventsResponse(last_event_number=10, changes=[pb.CacheChange(blocks=stored)]),
    ]
    found = values(events.taking(messages, 1_000, engines=2))
    assert found["an event over the network"] == len(messages[1].SerializeToString()) / 10
    assert found["events in a message"] == 10


def test_the_view_of_a_small_fleet_is_measured() -> None:
    found = values(capacity.view(Size(blocks=5_000, engines=3, shards=2, events=100)))
    assert found["measured: blocks of the view, 3 engines, 2 shards"] == 5_000
    assert 1 <= found["measured: engines that have a block"] <= 3


def test_what_a_fleet_needs_follows_from_its_costs() -> None:
    found = values(capacity.computed(Size(blocks=10_000_000, engines=256, shards=16, events=5_000), COSTS))
    assert found == pytest.approx(
        {
            "computed: memory of the view, for each router": 0.2,
            "computed: decision with hashing, prompts of 1,024 tokens": (256 * 5 + 64 * 0.5) / 1e3,
            "computed: prompts of 1,024 tokens that fill a core of a router": 1e6 / (256 * 5 + 64 * 0.5),
            "computed: decision with hashing, prompts of 100,000 tokens": (256 * 5 + 6_250 * 0.5) / 1e3,
            "computed: prompts of 100,000 tokens that fill a core of a router": 1e6 / (256 * 5 + 6_250 * 0.5),
            "computed: a router's share of a core for 80,000 events per second": 4,
            "computed: their bandwidth, for each router": 0.64,
            "computed: snapshots of all shards, for a router that starts": 15,
            "computed: their messages": 240,
            "computed: commands of Redis per second": 8_000,
            "computed: the index by key in addition": 120_000,
        }
    )
