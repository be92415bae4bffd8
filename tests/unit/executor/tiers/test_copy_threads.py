"""Copies run in order if they touch the same slots, else beside each other."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from executor.cache.tiers import copy_threads as copier_module
from executor.cache.tiers.copy_threads import CopyThreads
from executor.step import Copy, Tier
from tests.support.patience import patience
from tests.unit.executor.tiers.gates import waited_seconds, when_awaited
from tests.unit.executor.tiers.world import Ends, down, up

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


class Gates:
    """Copies that run until they are let go; `log` says what happened in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fail: set[int] = set()
        self._gates: dict[tuple[int, str], threading.Event] = {}
        self._begun: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self.ends = Ends()
        self.voided: list[int] = []
        self.copier = CopyThreads(self._run, lambda copy: self.voided.append(copy.ticket))

    def _gate(self, ticket: int, what: str) -> threading.Event:
        with self._lock:
            return self._gates.setdefault((ticket, what), threading.Event())

    def _run(
        self, copy: Copy, after: Any, source_read: Callable[[], None], together: int
    ) -> Generator[None, None, None]:
        self.log.append(f"begin {copy.ticket}")
        self._gate(copy.ticket, "begin").set()
        self._gate(copy.ticket, "read").wait(patience(10))
        source_read()
        yield
        self._gate(copy.ticket, "end").wait(patience(10))
        self.log.append(f"end {copy.ticket}")
        if copy.ticket in self.fail:
            raise OSError("full")

    def submit(self, *copies: Copy) -> None:
        self.copier.submit(copies, self.ends)

    def begun(self, ticket: int) -> None:
        assert self._gate(ticket, "begin").wait(patience(10)), f"{ticket} does not begin: {self.log}"

    def not_begun(self, ticket: int) -> None:
        begun = self._gate(ticket, "begin").wait(0.05)  # subject: nothing begins meanwhile
        assert not begun, f"{ticket} begins too early: {self.log}"

    def read(self, ticket: int) -> None:
        self._gate(ticket, "read").set()

    def end(self, ticket: int) -> None:
        self.read(ticket)
        self._gate(ticket, "end").set()

    def all_end(self) -> None:
        for ticket in range(1, 10):
            self.end(ticket)
        assert self.copier.drain(patience(10))

    @contextmanager
    def waiting(self, **places: list[Any]) -> Iterator[threading.Event]:
        """A step that waits in a thread; set when the step has its slots."""
        passed = threading.Event()
        thread = threading.Thread(target=lambda: (self.copier.wait(**places), passed.set()))
        thread.start()
        try:
            yield passed
        finally:
            thread.join(patience(10))
        assert passed.is_set()


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.all_end()
    assert not gates.copier.busy


def test_copies_of_different_slots_run_beside_each_other(gates: Gates) -> None:
    gates.submit(down(1, 1, 1), down(2, 2, 2), down(3, 1, 1, group=1))
    gates.begun(1)
    gates.begun(2)
    # As many as there are threads.
    gates.not_begun(3)
    gates.end(1)
    gates.begun(3)


def test_a_copy_waits_for_what_it_reads(gates: Gates) -> None:
    gates.submit(down(1, 1, 1), up(2, 1, 5))
    gates.begun(1)
    gates.read(1)
    gates.not_begun(2)
    gates.end(1)
    gates.begun(2)


def test_a_copy_does_not_overwrite_what_another_has_not_read(gates: Gates) -> None:
    gates.submit(up(1, 1, 5), down(2, 2, 1))
    gates.begun(1)
    gates.not_begun(2)
    gates.read(1)
    gates.begun(2)


def test_copies_into_one_slot_come_in_their_order(gates: Gates) -> None:
    gates.submit(down(1, 1, 1), down(2, 2, 1), up(3, 1, 3), down(4, 4, 1))
    for ticket in (1, 2, 3):
        gates.begun(ticket)
        gates.not_begun(ticket + 1)
        gates.end(ticket)
    gates.begun(4)


def test_what_a_disk_keeps_waiting_does_not_keep_memories_waiting(gates: Gates) -> None:
    gates.submit(*(Copy(ticket, 0, ticket, ticket, HOST, DISK) for ticket in (1, 2, 3)))
    gates.submit(down(4, 4, 4))
    gates.begun(4)


def test_the_same_numbers_in_another_tier_or_group_are_other_slots(gates: Gates) -> None:
    gates.submit(down(1, 1, 1), up(2, 1, 1, DISK), up(3, 1, 1, DISK, group=1))
    for ticket in (1, 3):
        gates.begun(ticket)
    gates.not_begun(2)


def test_a_step_waits_for_exactly_its_own_slots(gates: Gates) -> None:
    gates.submit(down(1, 1, 1), up(2, 2, 2))
    places = [(DEVICE, 0, slot) for slot in (3, 4)] + [(DEVICE, 1, 1), (DEVICE, 1, 2)]
    before = waited_seconds()
    gates.copier.wait(reads=places, writes=places)
    # What another reads may be read.
    gates.copier.wait(reads=[(DEVICE, 0, 1)])
    assert waited_seconds() == before
    with gates.waiting(writes=[(DEVICE, 0, 1)]) as passed:
        assert not passed.wait(0.05)  # subject: nothing passes meanwhile
        gates.read(1)
        assert passed.wait(patience(10))
    with gates.waiting(reads=[(DEVICE, 0, 2)]) as passed:
        gates.read(2)
        assert not passed.wait(0.05)  # subject: nothing passes meanwhile
        gates.end(2)


def test_the_time_that_a_step_waits_is_reported(gates: Gates) -> None:
    gates.submit(down(1, 1, 1))
    when_awaited(gates.copier, threading.Timer(0.2, lambda: gates.end(1)).start)
    before = waited_seconds()
    gates.copier.wait(writes=[(DEVICE, 0, 1)])
    assert waited_seconds() > before + 0.1


def test_a_disk_that_hangs_keeps_no_step_for_long(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "STALL_SECONDS", 0.05)
    for ticket in range(1, copier_module.DISK_THREADS + 1):
        gates.submit(down(ticket, ticket, ticket, tier=DISK))
        gates.begun(ticket)
    gates.submit(down(8, 8, 8, tier=DISK), down(9, 9, 9, tier=DISK))
    gates.copier.wait(writes=[(DEVICE, 0, 8)])
    # The next copy of its slot waits for it all the same, and none has waited for the other's.
    assert gates.copier.look(lambda changing: (DISK, 0, 8) in changing)
    assert gates.ends.of == {}
    gates.read(1)
    gates.copier.wait(writes=[(DEVICE, 0, 1)])
    for ticket in (1, 2, 9):
        gates.end(ticket)
    assert gates.copier.drain(patience(10))
    assert gates.ends.of == {8: False, 1: True, 2: True, 9: True}
    assert gates.voided == [8]
    assert "begin 8" not in gates.log


def test_a_copy_behind_a_failed_one_fails_and_frees_its_slots(gates: Gates) -> None:
    gates.fail = {1}
    gates.submit(down(1, 1, 1), up(2, 1, 5), down(3, 5, 6), down(4, 7, 1))
    for ticket in (1, 4):
        gates.begun(ticket)
        gates.end(ticket)
    assert gates.copier.drain(patience(10))
    # The last copy only comes after the first copy in the same slot.
    assert gates.ends.of == {1: False, 2: False, 3: False, 4: True}
    assert "begin 2" not in gates.log
    assert "begin 3" not in gates.log
    assert gates.voided == [1, 2, 3]


def test_slots_that_change_are_seen_at_once(gates: Gates) -> None:
    gates.submit(down(1, 1, 1), up(2, 2, 2, DISK), Copy(3, 1, 0, 4, HOST, HOST))
    assert gates.copier.look(set) == {(HOST, 0, 1), (DEVICE, 0, 2), (HOST, 1, 4)}
    gates.all_end()
    assert gates.copier.look(set) == set()


def test_waiting_for_all_copies_has_a_bound(gates: Gates) -> None:
    gates.submit(down(1, 1, 1))
    assert not gates.copier.drain(0.05)
    assert gates.copier.busy


def test_a_listener_that_fails_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(copy: Copy, good: bool) -> None:
        raise RuntimeError("the loop is closed")

    copier = CopyThreads(lambda copy, after, source_read, together: (None for _ in range(1)))
    copier.submit([down(1, 1, 1), down(2, 1, 1)], ended)
    assert copier.drain(patience(10))


def test_a_flood_of_failures_is_one_line_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    def run(copy: Copy, after: Any, source_read: Callable[[], None], together: int) -> Generator[None, None, None]:
        yield
        raise OSError(28, "No space left on device")

    copier, ends = CopyThreads(run, memory_threads=1), Ends()
    copier.submit([down(ticket, ticket, ticket) for ticket in range(1, 50)], ends)
    assert copier.drain(patience(10))
    assert not any(ends.of.values())
    assert len(ends.of) == 49
    assert capsys.readouterr().out.count("copies failed") == 1


def test_a_step_does_not_wait_for_ever_for_a_copy_that_has_begun(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    gates.submit(down(1, 1, 1))
    gates.begun(1)
    with monkeypatch.context() as patch:
        patch.setattr(copier_module, "STALL_SECONDS", 0.01)
        patch.setattr(copier_module, "LONGEST_WAIT_SECONDS", 0.02)
        with pytest.raises(copier_module.StuckCopyError, match="copies at 1 slots"):
            gates.copier.wait(writes=[(DEVICE, 0, 1)])
    # Its slot is as good as before, once it ends.
    gates.end(1)
    gates.copier.wait(writes=[(DEVICE, 0, 1)])


class Together:
    """Copies that run at once in one thread, which waits at the first copy until all are submitted; `log` as above."""

    def __init__(self, *, fail: Mapping[int, str]) -> None:
        self.log: list[str] = []
        self.ends = Ends()
        self.voided: list[int] = []
        self._fail = fail
        self._submitted = threading.Event()
        self.copier = CopyThreads(
            self._run, lambda copy: self.voided.append(copy.ticket), self._finish, memory_threads=1, together=3
        )

    def submit(self, *copies: Copy) -> None:
        self.copier.submit(copies, self.ends)
        self._submitted.set()
        assert self.copier.drain(patience(10))

    def _run(
        self, copy: Copy, after: Any, source_read: Callable[[], None], together: int
    ) -> Generator[None, None, None]:
        assert self._submitted.wait(patience(10))
        self._part(copy, "begin")
        yield
        self._part(copy, "end")
        self.log[-1] += f" of {together}"

    def _part(self, copy: Copy, part: str) -> None:
        self.log.append(f"{part} {copy.ticket}")
        if self._fail.get(copy.ticket) == part:
            raise OSError("full")

    def _finish(self) -> None:
        self.log.append("finish")
        if 0 in self._fail:
            raise RuntimeError("the device is lost")


def test_copies_begin_together_and_end_after_one_wait() -> None:
    world = Together(fail={2: "begin", 3: "end"})
    world.submit(*(down(ticket, ticket, ticket) for ticket in (1, 2, 3, 4, 5)), up(6, 4, 9))
    parts = ["begin 1", "begin 2", "begin 3", "finish", "end 1 of 3", "end 3"]
    # The last copy waits for another copy of the second turn.
    parts += ["begin 4", "begin 5", "finish", "end 4 of 2", "end 5 of 2", "begin 6", "finish", "end 6 of 1"]
    assert world.log == parts
    assert world.ends.of == {1: True, 2: False, 3: False, 4: True, 5: True, 6: True}
    assert world.voided == [2, 3]


def test_copies_that_begin_together_fail_together_if_the_device_does() -> None:
    world = Together(fail={0: "finish", 2: "begin"})
    world.submit(*(down(ticket, ticket, ticket) for ticket in (1, 2, 3)))
    assert world.log == ["begin 1", "begin 2", "begin 3", "finish"]
    assert world.ends.of == dict.fromkeys((1, 2, 3), False)
    assert world.voided == [2, 1, 3]
