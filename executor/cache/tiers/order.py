"""Which copies must wait for which: what a slot holds is read and written in the order in which it was asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from executor.step import Copy, Tier

# A slot of a layer group in a tier.
Place = tuple[Tier, int, int]


@dataclass(eq=False)
class Job:
    """A copy that was asked for. ended: called once with whether it ended well. after: what the device must do first.

    blockers: earlier copies that it still waits for. begun: a thread has taken it up. doomed: what it should read never
    came, or is no longer kept for it.
    """

    copy: Copy
    ended: Callable[[Copy, bool], None]
    after: Any = None
    blockers: int = 0
    begun: bool = False
    doomed: bool = False
    has_read: bool = False
    # Who waits until the source has been read, and who until all is done.
    until_read: list["Job"] = field(default_factory=list)
    until_ended: list["Job"] = field(default_factory=list)

    @property
    def source(self) -> Place | None:
        """What it reads; None when it writes zeros."""
        return (self.copy.source_tier, self.copy.group, self.copy.source) if self.copy.source else None

    @property
    def target(self) -> Place:
        """What it writes."""
        return self.copy.target_tier, self.copy.group, self.copy.target


@dataclass(eq=False)
class _Use:
    """Open copies at one place: the last one that writes there, and those behind it that read there."""

    writer: Job | None = None
    readers: set[Job] = field(default_factory=set)


class CopyOrder:
    """The open copies. Not thread-safe; true while there is one."""

    def __init__(self) -> None:
        self._uses: dict[Place, _Use] = {}

    def __bool__(self) -> bool:
        return bool(self._uses)

    def add(self, job: Job) -> bool:
        """Takes a copy in behind all others; whether it may run at once. Source and target are two places."""
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
        # Whoever comes later and waits for this one waits for those as well.
        use.writer, use.readers = job, set()
        return not job.blockers

    def read(self, job: Job) -> list[Job]:
        """The copy has read its source; returns those that may run now."""
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
        """The copy is over; returns those that may run now."""
        ready = self.read(job)
        use = self._uses[job.target]
        if use.writer is job:
            use.writer = None
            self._forget(job.target, use)
        if not good:
            for other in job.until_ended:
                other.doomed = other.doomed or other.source == job.target
        return ready + _released(job.until_ended)

    def readers(self, place: Place) -> list[Job]:
        """Open copies that have not read what is there."""
        use = self._uses.get(place)
        return [] if use is None else list(use.readers)

    def is_written(self, place: Place) -> bool:
        """Whether an open copy writes there: nobody else may read it."""
        use = self._uses.get(place)
        return use is not None and use.writer is not None

    def is_used(self, place: Place) -> bool:
        """Whether an open copy writes there or has not read what is there: nobody else may write it."""
        return place in self._uses

    def targets(self) -> set[Place]:
        """Places that will hold something else than they do."""
        return {place for place, use in self._uses.items() if use.writer is not None}

    def _forget(self, place: Place, use: _Use) -> None:
        if use.writer is None and not use.readers:
            del self._uses[place]


def _released(waiting: list[Job]) -> list[Job]:
    ready = []
    for job in waiting:
        job.blockers -= 1
        if not job.blockers:
            ready.append(job)
    return ready
