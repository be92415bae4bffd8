"""The time of a step on a GPU, by events on a simulated timeline, and the idle time before the step."""

import time

import pytest
import torch

from executor.core.timing import Clock
from tests.support.simulated_device import Timeline, TimelineEvent


class HostTime:
    """The time of a host that sleeps at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def host() -> HostTime:
    return HostTime()


@pytest.fixture
def timeline(host: HostTime, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    timeline = Timeline(lambda: host.now, host.sleep)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: TimelineEvent(timeline))
    return timeline


# By the milliseconds that the host prepares the second step: what the device was idle before, in milliseconds.
@pytest.mark.parametrize(("preparing", "idle"), [(1, 0), (5, 0), (8, 3)])
def test_a_device_is_idle_while_the_host_still_prepares_the_next_step(
    preparing: float, idle: float, host: HostTime, timeline: Timeline
) -> None:
    clock, spans = Clock(torch.device("cuda")), []
    for milliseconds in (2, preparing):
        spans.append(clock.start())
        host.sleep(milliseconds / 1e3)
        spans[-1].begin()
        timeline.compute(5e-3)
        spans[-1].end()
    assert spans[0].seconds() == pytest.approx((5e-3, 0))
    assert spans[1].seconds() == pytest.approx((5e-3, idle / 1e3))


def test_a_step_without_work_takes_no_time(host: HostTime, timeline: Timeline) -> None:
    clock = Clock(torch.device("cuda"))
    before = clock.start()
    before.begin()
    timeline.compute(5e-3)
    before.end()
    assert not before.is_over
    empty = clock.start()
    empty.end()
    assert empty.seconds() == pytest.approx((0, 0))
    assert before.is_over
    host.sleep(1e-3)
    later = clock.start()
    later.begin()
    timeline.compute(1e-3)
    later.end()
    assert later.seconds() == pytest.approx((1e-3, 1e-3))


def test_a_wait_for_copies_is_idle_time_once(host: HostTime, timeline: Timeline) -> None:
    clock, spans = Clock(torch.device("cuda")), []
    for waited in (0.0, 9e-3):
        spans.append(clock.start())
        host.sleep(waited)
        spans[-1].begin()
        timeline.compute(5e-3)
        spans[-1].end()
    # The device was busy for 5 of the 9 ms.
    assert spans[1].seconds(9e-3) == pytest.approx((5e-3, 4e-3))


def test_a_wait_for_copies_is_no_work_of_a_cpu(monkeypatch: pytest.MonkeyPatch, host: HostTime) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: host.now)
    span = Clock(torch.device("cpu")).start()
    host.sleep(9e-3)
    span.end()
    assert span.seconds(4e-3) == pytest.approx((5e-3, 4e-3))
