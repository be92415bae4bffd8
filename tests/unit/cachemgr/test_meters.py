"""Tokens looked up and found, per salt within a bound."""

import random

from cachemgr.blocks.hit_counters import HALF_LIFE_SECONDS, MAX_SALTS, TokenCount, TokenMeter


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
    # Most of what they looked up is theirs, not that of the others.
    counted = sum(meter.salts[salt].queried for salt in active)
    assert counted > 0.9 * 100 * 10_000


def test_salts_that_became_idle_give_their_entries_to_those_that_came_later():
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
