"""Schedules follow from their seeds and hold everything; reports judge what they are given."""

from __future__ import annotations

import dataclasses

import pytest

from tests.chaos.disturbances import KINDS, schedule_of
from tests.chaos.measuring import Death
from tests.chaos.report import Report
from tests.chaos.requests import Sample


@pytest.mark.parametrize("seed", range(5))
def test_a_long_schedule_has_every_kind_and_kills_the_cache_manager_every_20_seconds(seed: int) -> None:
    schedule = schedule_of(seed, 600)
    assert {one.kind for one in schedule} == set(KINDS)
    assert {one.target for one in schedule if one.kind == "pause"} == {"cachemgr", "executor", "scheduler", "redis"}
    deaths = [one.at for one in schedule if (one.kind, one.target) == ("kill", "cachemgr")]
    assert deaths == [10 + 20 * number for number in range(30)]
    assert [one.at for one in schedule] == sorted(one.at for one in schedule)
    assert all(0 <= one.at < 600 for one in schedule)
    assert {one.strength for one in schedule if one.target == "disk"} == {16 << 20, 128 << 20}


@pytest.mark.parametrize("seed", range(20))
def test_a_short_schedule_kills_every_process(seed: int) -> None:
    killed = {one.target for one in schedule_of(seed, 45) if one.kind == "kill"}
    assert killed == {"cachemgr", "executor", "scheduler", "redis"}


DEATH = Death("cachemgr", 10.0, 1.0, device_blocks=1000, restored_blocks=995, lower_blocks=0, seconds_to_admission=1.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"restored_blocks": 989}, "restored is 0.989"),
        ({"restored_blocks": None}, "restored is not known"),
        ({"seconds_to_admission": 2.1}, "admission is 2.100"),
        ({"seconds_to_admission": None}, "admission is not known"),
        ({"lower_blocks": 100, "restored_lower_blocks": 94}, "lower tiers' blocks restored is 0.940"),
        ({"lower_blocks": 100, "restored_lower_blocks": 95}, ""),
        ({"lower_blocks": 100}, "not known"),
    ],
)
def test_a_death_is_judged_by_lost_blocks_and_time(changes: dict[str, float | None], words: str) -> None:
    report = Report("test", 1)
    report.judge([dataclasses.replace(DEATH, **changes)])  # type: ignore[arg-type]
    if words:
        [fault] = report.faults
        assert words in fault
    else:
        assert report.faults == []


def test_a_sample_begins_another_only_as_long_as_nothing_differs() -> None:
    whole = Sample([1, 2, 3], "abc", 2)
    assert Sample([1, 2], "ab").begins(whole)
    assert Sample([1, 2, 3], "abc", 2).begins(whole)
    assert not Sample([1, 3], "ab").begins(whole)
    assert not Sample([1, 2], "ac").begins(whole)
    assert not Sample([1, 2], "ab", 2).begins(whole)
    assert not Sample([1, 2, 3, 4], "abcd").begins(whole)
