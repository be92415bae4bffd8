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
        clock.begin()
        timeline.compute(5e-3)
        spans[-1].end()
    assert spans[0].seconds() == pytest.approx((5e-3, 0))
    assert spans[1].seconds() == pytest.approx((5e-3, idle / 1e3))


def test_a_step_without_work_takes_no_time(host: HostTime, timeline: Timeline) -> None:
    clock = Clock(torch.device("cuda"))
    before = clock.start()
    clock.begin()
    timeline.compute(5e-3)
    before.end()
    assert not before.is_over
    empty = clock.start()
    empty.end()
    assert empty.seconds() == pytest.approx((0, 0))
    assert before.is_over
    host.sleep(1e-3)
    later = clock.start()
    clock.begin()
    timeline.compute(1e-3)
    later.end()
    assert later.seconds() == pytest.approx((1e-3, 1e-3))


# Seconds that the second step waits for copies before its first work and between its works; its work and idle time.
@pytest.mark.parametrize(
    ("before", "between", "expected"),
    [
        # The device still computes the first step for 6 of 9 ms.
        (9e-3, 0, (6e-3, 3e-3)),
        # The device computes the first step and the first work of the second for 7 of 9 ms.
        (0, 9e-3, (6e-3, 2e-3)),
        (0, 5e-3, (6e-3, 0)),
    ],
)
def test_a_wait_for_copies_is_idle_time_once(
    before: float, between: float, expected: tuple[float, float], host: HostTime, timeline: Timeline
) -> None:
    clock, spans = Clock(torch.device("cuda")), []
    for waits in ((0.0, 0.0), (before, between)):
        spans.append(clock.start())
        for wait, work in zip(waits, (1e-3, 5e-3), strict=True):
            with clock.waiting():
                host.sleep(wait)
            clock.begin()
            timeline.compute(work)
        spans[-1].end()
    assert spans[1].seconds() == pytest.approx(expected)


def test_a_wait_between_two_steps_is_idle_time_of_the_second(host: HostTime, timeline: Timeline) -> None:
    clock, spans = Clock(torch.device("cuda")), []
    for _ in range(2):
        spans.append(clock.start())
        clock.begin()
        timeline.compute(5e-3)
        spans[-1].end()
        with clock.waiting():
            host.sleep(9e-3)
    assert [span.seconds() for span in spans] == [pytest.approx((5e-3, 0)), pytest.approx((5e-3, 4e-3))]


def test_a_step_after_a_failed_step_has_no_idle_time(host: HostTime, timeline: Timeline) -> None:
    clock = Clock(torch.device("cuda"))
    clock.start().end()
    clock.clear()
    with clock.waiting():
        host.sleep(9e-3)
    clock.begin()
    span = clock.start()
    clock.begin()
    timeline.compute(5e-3)
    span.end()
    assert span.seconds() == pytest.approx((5e-3, 0))


def test_a_wait_for_copies_is_no_work_of_a_cpu(monkeypatch: pytest.MonkeyPatch, host: HostTime) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: host.now)
    clock = Clock(torch.device("cpu"))
    span = clock.start()
    host.sleep(5e-3)
    with clock.waiting():
        host.sleep(4e-3)
    span.end()
    with clock.waiting():
        host.sleep(1e-3)
    assert span.seconds() == pytest.approx((5e-3, 4e-3))
