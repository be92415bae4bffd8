"""Counters of pools and salts as Prometheus reads them."""

import dataclasses
import random

from cachemgr.blocks.hit_counters import HALF_LIFE_SECONDS, MAX_SALTS, TokenCount, TokenMeter
from cachemgr.slices import at_once
from cachemgr.telemetry.prometheus import LONGEST_STALL, Stalls, families
from cachemgr.types import BlockFilter, RemovalCause
from protos.rpc.logs import short_hash
from tests.support.in_process_manager import CONFIG, World, retain
from tests.support.scrape import scraped


def test_removed_blocks_are_counted_by_cause_with_the_time_since_the_last_use():
    world = World(4)
    world.cache(list(range(13)))
    world.cache(list(range(100, 113)))
    device = world.queries.block_pools("e/0")[0].device
    assert device.counters.evicted > 0
    for cause in list(RemovalCause)[1:]:
        told = scraped(world.manager, "tier_removed_blocks_total", pool="e/0", tier="device", cause=cause.name.lower())
        assert told == device.counters.removed[cause]
    assert (
        scraped(world.manager, "tier_idle_before_eviction_seconds_count", pool="e/0", tier="device")
        == device.counters.timed_evictions
        > 0
    )
    assert (
        scraped(world.manager, "tier_allocated_blocks_total", pool="e/0", tier="device")
        == device.counters.allocated
        > 4
    )


def test_salts_are_exported_by_their_hash_up_to_a_limit():
    world = World(4)
    for index in range(MAX_SALTS + 3):
        world.run(list(range(9)), f"s{index}", salt=f"salt-{index}")
        world.finish(f"s{index}")
    newest = short_hash(f"salt-{MAX_SALTS + 2}")
    assert scraped(world.manager, "salt_queried_tokens_total", pool="e/0", salt_sha256=newest) == 9
    assert scraped(world.manager, "salt_hit_tokens_total", pool="e/0", salt_sha256=newest) == 0
    assert scraped(world.manager, "salt_queried_tokens_total", pool="e/0", salt_sha256="others") == 3 * 9
    [family] = [one for one in families(world.manager.queries) if one.name == "kvkeep_salt_queried_tokens"]
    assert len(family.samples) == MAX_SALTS + 1
    assert not any("salt-" in sample.labels["salt_sha256"] for sample in family.samples)


def test_requests_without_a_salt_are_counted_apart_from_all_others():
    world = World(8)
    world.cache(list(range(9)))
    world.cache(list(range(9)))
    assert scraped(world.manager, "salt_queried_tokens_total", pool="e/0", salt_sha256="") == 18
    assert scraped(world.manager, "salt_hit_tokens_total", pool="e/0", salt_sha256="") == 8


def test_leases_are_counted_by_how_they_ended():
    world = World(8, config=dataclasses.replace(CONFIG, lease_seconds=1e9))
    world.cache(list(range(9)), session_id="s", retention=retain(80, 5.0))
    world.now = 5.0
    world.manager.expire()
    world.cache(list(range(4)), session_id="s", retention=retain(80, 5.0))
    at_once(world.operators.purge(BlockFilter(), validate_only=False))
    assert scraped(world.manager, "pool_honoured_leases_total", pool="e/0") == 3
    assert scraped(world.manager, "pool_broken_leases_total", pool="e/0") == 1


def test_the_longest_stall_of_the_last_minute_is_exported():
    stalls, told = Stalls(0.0), []
    for now, late in ((1, 0.1), (20, 2.0), (25, 0.0), (31, 0.3), (59, 0.0), (62, 0.1), (95, 0.0), (300, 0.0)):
        stalls.note(now, late)
        told.append(LONGEST_STALL._value.get())
    assert told == [0.1, 2.0, 2.0, 2.0, 2.0, 0.3, 0.1, 0.0]


# Tokens per salt


def check_sums(meter: TokenMeter) -> None:
    counts = [*meter.salts.values(), meter.others]
    assert meter.total == TokenCount(sum(count.queried for count in counts), sum(count.hit for count in counts))
    assert len(meter.salts) <= MAX_SALTS


def test_of_ten_thousand_salts_the_active_ones_have_entries():
    meter, choose = TokenMeter(), random.Random(1)
    active = [f"active-{number}" for number in range(20)]
    for number in range(10_000):
        meter.add(number / 100, f"seldom-{number}", 100, 0)
        meter.add(number / 100, choose.choice(active), 100, 50)
        check_sums(meter)
    assert set(active) <= set(meter.salts)
    # Most of the tokens that they looked up are counted for them, not for the other salts.
    counted = sum(meter.salts[salt].queried for salt in active)
    assert counted > 0.9 * 100 * 10_000


def test_idle_salts_yield_their_entries_to_later_ones():
    meter = TokenMeter()
    for number in range(MAX_SALTS):
        meter.add(0.0, f"early-{number}", 1_000_000, 0)
    begin = 20 * HALF_LIFE_SECONDS
    for at in range(100):
        for number in range(MAX_SALTS):
            meter.add(begin + at, f"late-{number}", 100, 10)
    check_sums(meter)
    assert set(meter.salts) == {f"late-{number}" for number in range(MAX_SALTS)}
    assert meter.others.queried >= MAX_SALTS * 1_000_000


def test_all_tokens_of_a_salt_that_kept_its_entry_are_counted():
    meter = TokenMeter()
    for number in range(MAX_SALTS):
        meter.add(float(number), f"s{number}", 10, 5)
        meter.add(float(number), "s0", 10, 5)
    assert meter.salts["s0"] == TokenCount(1010, 505)
    check_sums(meter)
