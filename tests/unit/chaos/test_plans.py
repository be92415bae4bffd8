"""Schedules follow from their seeds and hold everything; reports judge what they are given."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.chaos.disturbances import FLEET_PAUSES, FLEET_ROLES, KINDS, Disturbance, fleet_rounds, schedule_of
from tests.chaos.measuring import Death
from tests.chaos.recovery import Recovery, summary
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


@pytest.mark.parametrize("seed", range(10))
def test_the_rounds_of_a_fleet_kill_each_role_first_and_hold_everything(seed: int) -> None:
    roles = {*FLEET_ROLES, "redis"}
    rounds = list(itertools.islice(fleet_rounds(seed), 60))
    first = [one for (one,) in rounds[: len(roles)]]
    assert {(one.kind, one.role) for one in first} == {("kill", role) for role in roles}
    seen = {(one.kind, one.role) for disturbances in rounds for one in disturbances}
    assert seen >= {(kind, role) for kind in FLEET_PAUSES for role in roles}
    ways = {"router to engine", "engine to cachemgr", "routers to events of cachemgr"}
    assert seen >= {(kind, way) for kind in ("partition", "cut off") for way in ways}
    assert seen >= {("cut off", "redis"), ("empty", "redis"), ("away", "redis")}
    assert any(len(disturbances) == 2 for disturbances in rounds)
    assert all(len({one.target for one in disturbances}) == len(disturbances) for disturbances in rounds)
    assert rounds == list(itertools.islice(fleet_rounds(seed), 60))


def test_a_disturbance_of_one_process_counts_for_its_role() -> None:
    assert Disturbance(0, "kill", "cachemgr-1").role == "cachemgr"
    assert Disturbance(0, "partition", "router-0 to engine-2").role == "router to engine"


def test_recoveries_are_summed_up_by_role_and_disturbance() -> None:
    found = [Recovery("router", "kill", seconds) for seconds in (3.0, 1.0, 2.0)]
    assert summary([*found, Recovery("cachemgr", "pause", 0.5)]) == [
        {"role": "cachemgr", "disturbance": "pause", "median": 0.5, "lowest": 0.5, "highest": 0.5, "repeats": 1},
        {"role": "router", "disturbance": "kill", "median": 2.0, "lowest": 1.0, "highest": 3.0, "repeats": 3},
    ]


DEATH = Death("cachemgr", 10.0, 1.0, device_blocks=1000, restored_blocks=995, lower_blocks=0, seconds_to_admission=1.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"restored_blocks": 989}, "restored is 0.989"),
        ({"restored_blocks": None}, "restored is not known"),
        ({"seconds_to_admission": None}, "no sequence was admitted"),
        ({"lower_blocks": 100, "restored_lower_blocks": 94}, "lower tiers' blocks restored is 0.940"),
        ({"lower_blocks": 100, "restored_lower_blocks": 95}, ""),
        ({"lower_blocks": 100}, "not known"),
    ],
)
def test_a_death_is_judged_by_lost_blocks(changes: dict[str, float | None], words: str) -> None:
    report = Report("test", 1)
    report.judge([dataclasses.replace(DEATH, **changes)])  # type: ignore[arg-type]
    if words:
        [fault] = report.faults
        assert words in fault
    else:
        assert report.faults == []
    assert report.slow == []


def test_a_slow_admission_is_noted_and_no_fault() -> None:
    report = Report("test", 1)
    report.judge([dataclasses.replace(DEATH, seconds_to_admission=2.1)])
    assert report.faults == []
    [slow] = report.slow
    assert "admission is 2.100" in slow
    assert f"SLOW {slow}" in report.text()


def test_a_sample_begins_another_only_as_long_as_nothing_differs() -> None:
    whole = Sample([1, 2, 3], "abc", 2)
    assert Sample([1, 2], "ab").begins(whole)
    assert Sample([1, 2, 3], "abc", 2).begins(whole)
    assert not Sample([1, 3], "ab").begins(whole)
    assert not Sample([1, 2], "ac").begins(whole)
    assert not Sample([1, 2], "ab", 2).begins(whole)
    assert not Sample([1, 2, 3, 4], "abcd").begins(whole)
