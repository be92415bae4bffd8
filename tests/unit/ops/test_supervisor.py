"""Restarts, failures for good and the order of stopping, with a clock that tests turn."""

import threading
from pathlib import Path

import pytest
from children import Child
from supervisor import RESTARTS, Service, ServiceFailedError, Supervisor

from tests.support.patience import patience


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeProcess(Child):
    """Runs until `how` says how it ended; notes its stop in a list that all share."""

    def __init__(self, name: str, stopped: list[str]) -> None:
        super().__init__([], {}, folder=Path(), log=Path(), stop_seconds=0)
        self.name = name
        self.how = ""
        self.starts = 0
        self._stopped = stopped

    def start(self) -> None:
        self.starts += 1
        self.how = ""

    def ended(self) -> str:
        return self.how

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.how = "was killed by SIGKILL"

    def wait(self) -> bool:
        self._stopped.append(self.name)
        return True

    def tail(self) -> list[str]:
        return []


class World:
    """A supervisor over two fake processes, both started and ready."""

    def __init__(self) -> None:
        self.threads = threading.enumerate()
        self.clock = FakeClock()
        self.stopped: list[str] = []
        self.reports: list[str] = []
        self.first, self.second = (FakeProcess(name, self.stopped) for name in ("first", "second"))
        services = [Service(process.name, process) for process in (self.first, self.second)]
        self.supervisor = Supervisor(services, lambda service, state: self.reports.append(state), self.clock)
        for service in services:
            self.supervisor.start(service)

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.1
            self.supervisor.tick()


@pytest.fixture
def world() -> World:
    return World()


def test_service_that_ends_is_started_again_after_a_pause(world: World) -> None:
    world.run(1)
    world.first.how = "ended with status 1"
    world.supervisor.tick()
    assert world.first.starts == 1
    assert not world.supervisor.all_ready
    world.run(1)
    assert world.first.starts == 2
    assert world.second.starts == 1
    assert world.supervisor.all_ready


def test_service_that_ends_too_often_has_failed_for_good(world: World) -> None:
    world.run(1)
    for _ in range(RESTARTS):
        world.first.how = "ended with status 1"
        world.run(5)
    assert world.first.starts == 1 + RESTARTS
    world.first.how = "ended with status 1"
    with pytest.raises(ServiceFailedError, match="first ended with status 1"):
        world.supervisor.tick()


def test_old_ends_are_forgiven(world: World) -> None:
    world.run(1)
    for _ in range(3 * RESTARTS):
        world.first.how = "ended with status 1"
        world.run(30)
    assert world.first.starts == 1 + 3 * RESTARTS


def test_service_that_ends_before_it_was_ready_is_not_started_again(world: World) -> None:
    world.first.how = "ended with status 2"
    with pytest.raises(ServiceFailedError, match="before it was ready"):
        world.supervisor.tick()
    assert world.first.starts == 1


def test_no_thread_outlives_a_supervisor(world: World) -> None:
    world.run(1)
    probes = [thread for thread in threading.enumerate() if thread not in world.threads]
    assert probes
    world.supervisor.stop()
    for thread in probes:
        thread.join(patience(10))
        assert not thread.is_alive()


def test_processes_stop_in_reverse_order_and_ended_ones_are_skipped(world: World) -> None:
    world.run(1)
    world.supervisor.stop()
    assert world.stopped == ["second", "first"]
    world.stopped.clear()
    world.second.how = "ended with status 1"
    world.supervisor.stop()
    assert world.stopped == ["first"]
