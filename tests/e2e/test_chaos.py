"""Everything dies, pauses and fails under load, and no request is lost: the short form of `make chaos`."""

from __future__ import annotations

import pytest

from tests.chaos.disturbances import FLEET_ROLES
from tests.chaos.run import fleet, mixed

SECONDS = 80.0
FLEET_SECONDS = 60.0
SEED = 4


def tell(line: str) -> None:
    """Shown when the test fails."""
    print(line, flush=True)


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_under_chaos_every_request_ends_exactly_and_no_block_is_lost() -> None:
    report = await mixed(SEED, SECONDS, tell)
    print(report.text())
    assert report.faults == []
    assert report.tally.endings["exact"] > 0
    deaths = {f"kill {name}" for name in ("cachemgr", "executor", "scheduler", "redis")}
    assert deaths <= report.disturbances.keys()


@pytest.mark.timeout(600)
async def test_a_fleet_under_chaos_answers_every_request_exactly_and_keeps_nothing() -> None:
    report = await fleet(SEED, FLEET_SECONDS, tell)
    print(report.text())
    assert report.faults == []
    assert report.streams["exact"] > 0
    deaths = {f"kill {role}" for role in (*FLEET_ROLES, "redis")}
    assert deaths <= report.disturbances.keys()
