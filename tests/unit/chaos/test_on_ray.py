"""Chaos on Ray: the order follows from the seed, and wrong, lost and missing answers are faults."""

import itertools
import random

import pytest

from tests.chaos import on_ray
from tests.chaos.on_ray import NODE, SCALE, WORK, Report
from tests.support.ray_cluster import RayFleet
from tests.support.ray_load import STREAMS, Answers


def taken(seed: int, count: int) -> list[str]:
    return list(itertools.islice(on_ray._order(random.Random(seed)), count))


def test_the_order_follows_from_the_seed_and_has_each_kind_in_each_round() -> None:
    kinds = {*WORK, SCALE, NODE}
    order = taken(1, 3 * len(kinds))
    assert order == taken(1, 3 * len(kinds))
    assert order != taken(2, 3 * len(kinds))
    for round_ in range(3):
        assert set(order[round_ * len(kinds) : (round_ + 1) * len(kinds)]) == kinds


class Fleet(RayFleet):
    """A fleet that notes what happens to it."""

    def __init__(self, *there: str) -> None:
        """there: members of each host."""
        self._there, self.done = list(there), list[str]()

    def members_on(self, _host: str) -> list[str]:
        return self._there

    def add(self, host: str) -> None:
        self.done.append(f"add {host}")

    def lose(self, host: str) -> None:
        self.done.append(f"lose {host}")


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        (Answers(requests=STREAMS), ""),
        (Answers(requests=STREAMS, cut=3), ""),
        (Answers(requests=STREAMS, wrong=[7]), "wrong tokens for prompt 7"),
        (Answers(requests=STREAMS, lost=["INTERNAL: x"]), "INTERNAL: x"),
        (Answers(requests=STREAMS - 1), f"only {STREAMS - 1} requests were answered"),
    ],
)
def test_a_lost_node_comes_back_and_faults_are_reported(
    monkeypatch: pytest.MonkeyPatch, answers: Answers, fault: str
) -> None:
    asked: list[list[str]] = []

    def ask_while(_fleet: object, work: object, *, cuts: list[str]) -> Answers:
        asked.append(cuts)
        work()  # type: ignore[operator]
        return answers

    monkeypatch.setattr(on_ray, "ask_while", ask_while)
    fleet, report = Fleet("engine-0", "router-1"), Report(1)
    assert on_ray._lose(fleet, NODE, random.Random(1), report, lambda _: None)
    assert [line.partition(" ")[0] for line in fleet.done] == ["lose", "add"]
    # Only streams of lost routers may be cut.
    assert asked == [["router-1"]]
    assert report.faults == ([f"node with engine-0, router-1: {fault}"] if fault else [])
    assert f"{answers.cut}" in report.text()


def test_a_fleet_that_does_not_become_complete_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_while(_fleet: object, _work: object, *, cuts: list[str]) -> Answers:
        assert not cuts
        raise AssertionError("not whole")

    monkeypatch.setattr(on_ray, "ask_while", ask_while)
    report = Report(1)
    assert not on_ray._lose(Fleet(), "executor, `kill -9`", random.Random(1), report, lambda _: None)
    assert report.faults == ["executor, `kill -9`: not whole"]
