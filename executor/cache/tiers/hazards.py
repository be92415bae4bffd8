"""Hazards between copies: each slot is read and written in the order in which copies were submitted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from executor.step import Copy, Tier

# A slot of a layer group in a tier.
SlotRef = tuple[Tier, int, int]


@dataclass(eq=False)
class Job:
    """A submitted copy. ended: called once with whether it succeeded. after: a mark that the device must pass first.

    blockers: number of earlier copies that it waits for. begun: whether a thread runs it. lost_source: whether its
    source was never written, or is no longer kept for it.
    """

    copy: Copy
    ended: Callable[[Copy, bool], None]
    after: Any = None
    blockers: int = 0
    begun: bool = False
    lost_source: bool = False
    has_read: bool = False
    # Copies that wait until the source has been read, and until the copy has ended.
    until_read: list["Job"] = field(default_factory=list)
    until_ended: list["Job"] = field(default_factory=list)

    @property
    def source(self) -> SlotRef | None:
        """The slot that the copy reads; None if it writes zeros."""
        return (self.copy.source_tier, self.copy.group, self.copy.source) if self.copy.source else None

    @property
    def target(self) -> SlotRef:
        """The slot that the copy writes."""
        return self.copy.target_tier, self.copy.group, self.copy.target


@dataclass(eq=False)
class _Use:
    """Open copies at one slot: the last copy that writes it, and the later copies that read it."""

    writer: Job | None = None
    readers: set[Job] = field(default_factory=set)


class CopyHazards:
    """The open copies. Not thread-safe; true while a copy is open."""

    def __init__(self) -> None:
        self._uses: dict[SlotRef, _Use] = {}

    def __bool__(self) -> bool:
        return bool(self._uses)

    def add(self, job: Job) -> bool:
        """Adds a copy after all others; returns whether it may run at once. Source and target must differ."""
        if job.source is not None:
            use = self._uses.setdefault(job.source, _Use())
            if use.writer is not None:
                use.writer.until_ended.append(job)
                job.blockers += 1
            use.readers.add(job)
        use = self._uses.setdefault(job.target, _Use())
        if use.writer is not None:
            use.writer.until_ended.append(job)
            job.blockers += 1
        for reader in use.readers:
            reader.until_read.append(job)
            job.blockers += 1
        # Later copies that wait for this copy wait for its readers as well.
        use.writer, use.readers = job, set()
        return not job.blockers

    def read(self, job: Job) -> list[Job]:
        """Notes that a copy has read its source; returns the copies that may run now."""
        if job.has_read:
            return []
        job.has_read = True
        if job.source is not None:
            use = self._uses.get(job.source)
            if use is not None:
                use.readers.discard(job)
                self._forget(job.source, use)
        return _released(job.until_read)

    def end(self, job: Job, good: bool) -> list[Job]:
        """Notes that a copy has ended; returns the copies that may run now."""
        ready = self.read(job)
        use = self._uses[job.target]
        if use.writer is job:
            use.writer = None
            self._forget(job.target, use)
        if not good:
            for other in job.until_ended:
                other.lost_source = other.lost_source or other.source == job.target
        return ready + _released(job.until_ended)

    def readers(self, slot: SlotRef) -> list[Job]:
        """Returns the open copies that have yet to read this slot, of those added after the last writer of the slot."""
        use = self._uses.get(slot)
        return [] if use is None else list(use.readers)

    def is_written(self, slot: SlotRef) -> bool:
        """Returns whether an open copy writes this slot, which then must not be read."""
        use = self._uses.get(slot)
        return use is not None and use.writer is not None

    def is_used(self, slot: SlotRef) -> bool:
        """Returns whether an open copy writes this slot or has yet to read it, so that it must not be written."""
        return slot in self._uses

    def targets(self) -> set[SlotRef]:
        """Returns the slots that open copies will write."""
        return {slot for slot, use in self._uses.items() if use.writer is not None}

    def _forget(self, slot: SlotRef, use: _Use) -> None:
        if use.writer is None and not use.readers:
            del self._uses[slot]


def _released(waiting: list[Job]) -> list[Job]:
    ready = []
    for job in waiting:
        job.blockers -= 1
        if not job.blockers:
            ready.append(job)
    return ready
