"""Holds of very many blocks end in parts, so that no call takes long."""

from dataclasses import replace

from bench.driver import CALLER, CONFIG, Driver, prompt
from cachemgr.sequences.holds import RELEASED_AT_A_TIME

BLOCKS = 2 * RELEASED_AT_A_TIME + 300


def held(*lengths: int) -> Driver:
    """Sequences of these numbers of blocks, which are held for five seconds."""
    driver = Driver(BLOCKS + 500, config=replace(CONFIG, capacity_ahead_tokens=0))
    for number, length in enumerate(lengths):
        admission = driver.admit(str(number), prompt(number, 16 * length))
        driver.manager.hold(CALLER, str(number), "agent", 5.0)
        driver.sync({admission.sequence_handle: 16 * length}, released=[admission.sequence_handle])
    assert driver.pool.used_blocks == sum(lengths)
    return driver


def ended(driver: Driver) -> list[int]:
    """Blocks that each call of `expire` lets go of, until none is due; holds are whole or ended for checks."""
    driver.now = 6.0
    parts = []
    while driver.pool.used_blocks:
        before = driver.pool.used_blocks
        driver.manager.expire()
        parts.append(before - driver.pool.used_blocks)
        assert driver.manager.is_behind == bool(driver.pool.used_blocks)
        assert driver.manager.queries.check_pool() == []
    assert list(driver.manager.queries.holds()) == []
    return parts


def test_a_long_hold_ends_in_parts_the_tail_first() -> None:
    assert ended(held(BLOCKS)) == [RELEASED_AT_A_TIME, RELEASED_AT_A_TIME, 300]


def test_many_holds_that_end_at_once_end_in_parts() -> None:
    assert ended(held(*[BLOCKS // 4] * 4)) == [RELEASED_AT_A_TIME, RELEASED_AT_A_TIME, 300]


def test_a_lasting_hold_is_kept_while_another_ends_in_parts() -> None:
    driver = held(BLOCKS - 100)
    admission = driver.admit("lasting", prompt(99, 16 * 100))
    driver.manager.hold(CALLER, "lasting", "other", 1000.0)
    driver.sync({admission.sequence_handle: 1600}, released=[admission.sequence_handle])
    driver.now = 6.0
    for _ in range(3):
        driver.manager.expire()
    assert not driver.manager.is_behind
    assert driver.pool.used_blocks == 100
    assert [hold.owner for hold in driver.manager.queries.holds()] == ["other"]
    assert driver.manager.queries.check_pool() == []
