"""Random copies between three tiers, slow and failing at every moment, beside steps: as if one ran after another."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.cache.tiers import copy_threads as copier_module
from executor.cache.tiers.block_copy import BlockCopier
from executor.cache.tiers.copy_threads import CopyThreads, Run
from executor.cache.tiers.device import CpuBlocks
from executor.cache.tiers.hazards import SlotRef
from executor.cache.tiers.slot_file import DiskFile, HostFile, SlotFile
from executor.step import Copy, Tier
from tests.support.patience import patience
from tests.unit.executor.tiers.world import Ends, block, fill, held, make_file, make_pools

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
SLOTS = 3


class Trouble:
    """Makes what a copy does slow, and breaks it off in the middle of its n-th part; looks for double use of slots."""

    def __init__(self, random_: random.Random) -> None:
        self.fails: dict[int, int] = {}
        self.wrong: list[str] = []
        self._random = random_
        self._local = threading.local()
        self._lock = threading.Lock()
        self._readers: Counter[SlotRef] = Counter()
        self._writers: Counter[SlotRef] = Counter()

    def part(self, work: Callable[[float], None]) -> None:
        """One part of a copy; `work` does a share of it."""
        self._local.left -= 1
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * 5e-4)
        if self._local.left == -1:
            work(0.5)
            raise OSError("it broke off")
        work(1.0)

    def use(self, place: SlotRef | None, count: int, *, writes: bool) -> None:
        """Begins or ends a use."""
        if place is None:
            return
        with self._lock:
            (self._writers if writes else self._readers)[place] += count
            others = self._writers[place] + (self._readers[place] if writes else 0)
            if count > 0 and others > (1 if writes else 0):
                self.wrong.append(f"{place} is used twice")

    def around(self, run: Run) -> Run:
        """What the copier runs."""

        def slow(copy: Copy, after: Any, source_read: Callable[[], None], together: int) -> Generator[None, None, None]:
            source = (copy.source_tier, copy.group, copy.source) if copy.source else None
            target = (copy.target_tier, copy.group, copy.target)
            self._local.left = self.fails.get(copy.ticket, 1000)
            reading = [source]

            def read() -> None:
                if reading:
                    self.use(reading.pop(), -1, writes=False)
                    source_read()

            self.use(source, 1, writes=False)
            self.use(target, 1, writes=True)
            try:
                for _ in run(copy, after, read, together):
                    # Other copies run in this thread until the end of this copy.
                    left = self._local.left
                    yield
                    self._local.left = left
            finally:
                self.use(target, -1, writes=True)
                if reading:
                    self.use(source, -1, writes=False)

        return slow

    def around_void(self, void: Callable[[Copy], None]) -> Callable[[Copy], None]:
        """The copier's work after a failed copy; it can fail as well."""

        def slow(copy: Copy) -> None:
            self._local.left = self.fails.get(copy.ticket, 1000)
            void(copy)

        return slow


def slow_file(kind: type[SlotFile], trouble: Trouble) -> type[SlotFile]:
    """A tier whose every part can be broken off."""

    class Slow(kind):  # type: ignore[misc, valid-type]
        def store(self, group: int, slot: int, data: Any) -> None:
            def work(share: float) -> None:
                part = data.copy()
                part[int(share * len(part)) :] = 0xEE
                super(Slow, self).store(group, slot, part)

            trouble.part(work)

        def _store_entry(self, group: int, slot: int, entry: tuple[int, int]) -> None:
            whole = super()._store_entry
            trouble.part(lambda share: whole(group, slot, entry) if share == 1 else None)

        def fetch(self, group: int, slot: int, staging: Any) -> Any:
            trouble.part(lambda share: None)
            return super().fetch(group, slot, staging)

    return Slow


class SlowDevice(CpuBlocks):
    """A device whose every part can be broken off, and that copies when a thread waits for it."""

    def __init__(self, pools: Any, trouble: Trouble) -> None:
        super().__init__(pools)
        self._trouble = trouble
        self._local = threading.local()

    def begin_read(self, group: int, slot: int, into: Any, after: Any) -> None:
        def work(share: float) -> None:
            super(SlowDevice, self).begin_read(group, slot, into, after)
            into[int(share * len(into)) :] = 0xEE

        self._begin(work)

    def begin_write(self, group: int, slot: int, data: Any, after: Any) -> None:
        def work(share: float) -> None:
            part = data.copy()
            part[int(share * len(part)) :] = 0xEE
            super(SlowDevice, self).begin_write(group, slot, part, after)

        self._begin(work)

    def _begin(self, work: Callable[[float], None]) -> None:
        self._local.begun = [*getattr(self._local, "begun", ()), work]
        self._trouble.part(lambda share: None)

    def finish(self) -> None:
        begun, self._local.begun = getattr(self._local, "begun", ()), []
        for work in begun:
            work(1.0)


class World:
    """The real thing, and what it should be: per slot the value that was written, None where no reader may look."""

    # In how many parts a copy runs: to the device, to a lower tier, without a source.
    PARTS_UP = 2
    PARTS = 4
    ZERO_PARTS = 2

    def __init__(self, folder: Path, seed: int) -> None:
        self.trouble = Trouble(random.Random(seed))
        self.pools = make_pools(SLOTS)
        self.files = {
            kind.tier: make_file(slow_file(kind, self.trouble), self.pools, folder / kind.tier.name, SLOTS)
            for kind in (HostFile, DiskFile)
        }
        mover = BlockCopier(SlowDevice(self.pools, self.trouble), self.files, checksums=True)
        self.copier = CopyThreads(
            self.trouble.around(mover.run), self.trouble.around_void(mover.void), mover.finish, together=1 + seed % 3
        )
        self.ends = Ends()
        self.expected: dict[int, bool] = {}
        self.ticket = 0
        self.values: dict[SlotRef, int | None] = {}
        self.generations: dict[SlotRef, int] = {}
        for group in (0, 1):
            for slot in range(1, SLOTS + 1):
                self.step_writes((DEVICE, group, slot))

    def copy(self, source: SlotRef, target: SlotRef, fails_at: int) -> None:
        value = self.values.get(source)
        if source == target or (source[0] is DEVICE and value is None):
            return
        self.ticket += 1
        if source[0] is target[0] is DEVICE:
            self.copier.wait([source], [target])
            self._step_uses(target)
            for cache in (self.pools.pools[source[1]].k, self.pools.pools[source[1]].v):
                cache[:, target[2]] = cache[:, source[2]]
            self._holds(target, value)
            return
        copy = Copy(self.ticket, source[1], source[2], target[2], source[0], target[0])
        parts = self.PARTS_UP if target[0] is DEVICE else self.PARTS
        self._begin(copy, target, value, good=value is not None and fails_at >= parts, fails_at=fails_at)

    def fetch(self, source: SlotRef, target: SlotRef) -> None:
        """A copy that a step waits for."""
        self.copy(source, target, 100)
        self.step_reads(target)

    def zero(self, target: SlotRef, fails_at: int) -> None:
        if target[0] is DEVICE:
            return
        self.ticket += 1
        copy = Copy(self.ticket, target[1], 0, target[2], target[0], target[0])
        self._begin(copy, target, None, good=fails_at >= self.ZERO_PARTS, fails_at=fails_at)

    def _begin(self, copy: Copy, target: SlotRef, value: int | None, *, good: bool, fails_at: int) -> None:
        self.expected[copy.ticket] = good
        self.trouble.fails[copy.ticket] = fails_at
        self._holds(target, value if good else None)
        self.generations[target] = copy.ticket if good and copy.source else 0
        self.copier.submit([copy], self.ends)

    def step_writes(self, place: SlotRef) -> None:
        if place[0] is not DEVICE:
            return
        self.ticket += 1
        self.copier.wait((), [place])
        self._step_uses(place)
        fill(self.pools, place[1], place[2], self.ticket)
        self._holds(place, self.ticket)

    def step_reads(self, place: SlotRef) -> None:
        if place[0] is DEVICE and self.values[place] is not None:
            self.copier.wait([place])
            assert block(self.pools, place[1], place[2]) == self._bytes(place)

    def look(self) -> None:
        """What would be reported to a new manager."""

        def view(changing: set[SlotRef]) -> None:
            for tier, file in self.files.items():
                for group, row in enumerate(file.generations().tolist()):
                    for slot, generation in enumerate(row, 1):
                        place = (tier, group, slot)
                        if place not in changing:
                            assert generation == self.generations.get(place, 0)

        self.copier.look(view)

    def finish(self) -> None:
        assert self.copier.drain(patience(20))
        assert not self.copier.busy
        assert self.ends.of == self.expected
        assert self.trouble.wrong == []
        self.look()
        for place, value in self.values.items():
            if value is not None:
                tier, group, slot = place
                found = block(self.pools, group, slot) if tier is DEVICE else held(self._plain(tier), group, slot)
                assert found == self._bytes(place)

    def _plain(self, tier: Tier) -> SlotFile:
        # Reading is a part as well.
        self.trouble._local.left = 1000
        return self.files[tier]

    def _step_uses(self, place: SlotRef) -> None:
        self.trouble.use(place, 1, writes=True)
        self.trouble.use(place, -1, writes=True)

    def _holds(self, place: SlotRef, value: int | None) -> None:
        self.values[place] = value

    def _bytes(self, place: SlotRef) -> bytes:
        value, pool = self.values[place], self.pools.pools[place[1]]
        assert value is not None
        shape = pool.k[:, 0].shape
        one = (torch.arange(pool.k[:, 0].numel()).reshape(shape) + float(value)).to(pool.k.dtype)
        return one.contiguous().view(torch.uint8).numpy().tobytes() * 2


PLACES = st.tuples(st.sampled_from(Tier), st.just(0), st.integers(1, SLOTS))
# Most copies do not fail.
FAILS = st.sampled_from([100] * 8 + [0, 1, 2, 3])
OPERATIONS = st.one_of(
    st.tuples(st.just("copy"), PLACES, PLACES, FAILS),
    st.tuples(st.just("fetch"), PLACES, PLACES),
    st.tuples(st.just("zero"), PLACES, FAILS),
    st.tuples(st.just("step_writes"), PLACES),
    st.tuples(st.just("step_reads"), PLACES),
    st.tuples(st.just("look")),
)
EXAMPLES = 1000 if os.environ.get("FUZZ") else 100


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, min_size=20, max_size=60), seed=st.integers(0, 1 << 30))
def test_copies_leave_what_they_leave_one_after_another(operations: list[tuple[Any, ...]], seed: int) -> None:
    # A machine so slow that a step gives copies up is no part of what should be.
    with TemporaryDirectory() as folder, mock.patch.object(copier_module, "STALL_SECONDS", 60):
        world = World(Path(folder), seed)
        try:
            for name, *arguments in operations:
                getattr(world, name)(*arguments)
        finally:
            world.copier.drain(patience(20))
        world.finish()
        for file in world.files.values():
            file.close()
