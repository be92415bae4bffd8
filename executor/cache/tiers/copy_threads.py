"""Runs copies between tiers asynchronously, in separate threads; copies of a slot keep their order."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog

from executor import metrics
from executor.cache.tiers.hazards import CopyHazards, Job, SlotRef
from executor.step import Copy, Tier
from protos.rpc.logs import Summaries

log = structlog.get_logger()

# A slow disk must not delay copies between memories.
DISK_THREADS = 2
# How long a step waits for its slots if copies to a disk use them; then copies that have not begun are given up.
STALL_SECONDS = 1.0
# How long a step waits for any other copy: a copy that hangs must not block the device forever.
LONGEST_WAIT_SECONDS = 20.0

T = TypeVar("T")
# Begins a copy, yields, and ends the copy after `finish`. Arguments: the copy, a mark that the device must pass first,
# a callback once the source has been read, and the number of copies that the thread runs together. May raise.
Run = Callable[[Copy, Any, Callable[[], None], int], Generator[None, None, None]]
# Called once per copy, in any thread, with whether it succeeded.
Ended = Callable[[Copy, bool], None]


class StuckCopyError(Exception):
    """A copy holds slots that a step needs, and does not end."""


class LostSourceError(Exception):
    """The source of a copy was never written, or was given up because a step could not wait any longer."""


class CopyThreads:
    """Threads that run copies; they start with the first copy. One thread submits copies and waits for them.

    void: called for every copy that fails, because its target must not keep its old contents. finish: called by a
    thread that has begun some copies; returns when they are done. memory_threads: threads for copies between memories.
    together: copies between memories that a thread begins, at most, before it calls `finish`.
    """

    def __init__(
        self,
        run: Run,
        void: Callable[[Copy], None] = lambda _: None,
        finish: Callable[[], None] = lambda: None,
        *,
        memory_threads: int = 2,
        together: int = 1,
    ) -> None:
        self._run = run
        self._finish = finish
        self._memory_threads = memory_threads
        self._together = together
        self._void = void
        self._order = CopyHazards()
        self._changed = threading.Condition()
        self._memory: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._disk: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._started = False
        # Every copy to a full disk fails.
        self._summaries = Summaries()
        self._unlogged = 0

    @property
    def busy(self) -> bool:
        """Whether any copy is open. Costs nothing; while it is false there is nothing to wait for."""
        return bool(self._order)

    def submit(self, copies: Sequence[Copy], ended: Ended, after: Any = None) -> None:
        """Submits copies; at each slot, copies run in the order in which they were submitted.

        ended: called once per copy, in another thread. after: handed to `run`.
        """
        if not self._started:
            self._start()
        metrics.PENDING_COPIES.inc(len(copies))
        with self._changed:
            self._dispatch([job for copy in copies if self._order.add(job := Job(copy, ended, after))])

    def wait(self, reads: Iterable[SlotRef] = (), writes: Iterable[SlotRef] = ()) -> None:
        """Waits until no copy writes what the caller will read, or uses what the caller will write.

        Copies to a disk that have not begun after STALL_SECONDS are given up: a disk that hangs must not block the
        device. Raises StuckCopyError if copies still use such slots after LONGEST_WAIT_SECONDS.
        """
        with self._changed:
            left = [slot for slot in reads if self._order.is_written(slot)]
            used = [slot for slot in writes if self._order.is_used(slot)]
            if not left and not used:
                return
            begin = time.perf_counter()
            until, gave_up = begin + STALL_SECONDS, False
            while left or used:
                self._changed.wait(max(0.0, until - time.perf_counter()))
                if time.perf_counter() >= until:
                    if gave_up:
                        raise StuckCopyError(f"copies at {len({*left, *used})} slots do not end")
                    self._give_up(used)
                    until, gave_up = begin + LONGEST_WAIT_SECONDS, True
                left = [slot for slot in left if self._order.is_written(slot)]
                used = [slot for slot in used if self._order.is_used(slot)]
            metrics.COPY_WAIT_SECONDS.inc(time.perf_counter() - begin)

    def _give_up(self, slots: Iterable[SlotRef]) -> None:
        """Frees slots from copies to a disk that have not begun; such copies fail when their turn comes."""
        readers = {job: None for slot in slots for job in self._order.readers(slot)}
        for job in readers:
            # Copies that wait for other copies also hold slots on behalf of these.
            if not job.begun and not job.blockers and job.copy.target_tier is Tier.DISK:
                job.lost_source = True
                self._dispatch(self._order.read(job))
        self._changed.notify_all()

    def look(self, view: Callable[[set[SlotRef]], T]) -> T:
        """Calls `view` with the slots that open copies will write, while no copy can begin."""
        with self._changed:
            return view(self._order.targets())

    def drain(self, seconds: float) -> bool:
        """Waits until no copy is open, but at most `seconds`; returns whether none is open."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._order, seconds)

    def _start(self) -> None:
        self._started = True
        for name, jobs, count, together in (
            ("memory", self._memory, self._memory_threads, self._together),
            # Each thread has staging memory for one block.
            ("disk", self._disk, DISK_THREADS, 1),
        ):
            for _ in range(count):
                threading.Thread(target=self._work, args=(jobs, together), name=f"copies, {name}", daemon=True).start()

    def _dispatch(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            tiers = job.copy.source_tier, job.copy.target_tier
            (self._disk if Tier.DISK in tiers else self._memory).put(job)

    def _work(self, jobs: queue.SimpleQueue[Job], together: int) -> None:
        while True:
            taken = _take(jobs, together)
            with self._changed:
                for job in taken:
                    job.begun = True
            failed = self._run_all(taken)
            for job in taken:
                self._report(job, job not in failed)
            with self._changed:
                for job in taken:
                    self._dispatch(self._order.end(job, job not in failed))
                self._changed.notify_all()

    def _run_all(self, jobs: Sequence[Job]) -> set[Job]:
        """Runs copies that do not touch the same slots; returns those that failed."""
        runs = {job: self._run(job.copy, job.after, partial(self._read, job), len(jobs)) for job in jobs}
        begun = [job for job in jobs if self._try(job, partial(_begin, job, runs[job]))]
        lost: Exception | None = None
        try:
            # Also after a failure: the device may still use the slots.
            self._finish()
        except Exception as error:  # As in `_try`: all these copies fail.
            lost = error
        ended = {job for job in begun if self._try(job, partial(_end, runs[job], lost))}
        return {*jobs} - ended

    def _report(self, job: Job, good: bool) -> None:
        try:
            job.ended(job.copy, good)
        except Exception:  # The slots must be released even if the callback fails.
            log.exception("the end of a copy was not reported", ticket=job.copy.ticket)
        metrics.PENDING_COPIES.dec()

    def _try(self, job: Job, part: Callable[[], object]) -> bool:
        try:
            try:
                part()
            except Exception:
                self._void(job.copy)
                raise
        except Exception as error:  # A copy that fails must not take the process with it.
            self._failed(job.copy, error)
            return False
        return True

    def _read(self, job: Job) -> None:
        with self._changed:
            self._dispatch(self._order.read(job))
            self._changed.notify_all()

    def _failed(self, copy: Copy, error: Exception) -> None:
        tiers = copy.source_tier.name.lower(), copy.target_tier.name.lower()
        metrics.FAILED_COPIES.labels(*tiers).inc()
        self._unlogged += 1
        if self._summaries.is_due():
            count, self._unlogged = self._unlogged, 0
            log.warning("copies failed", count=count, source=tiers[0], target=tiers[1], last=repr(error))


def _take(jobs: queue.SimpleQueue[Job], most: int) -> list[Job]:
    """Waits for a job; returns it with others that wait, `most` in all."""
    taken = [jobs.get()]
    with contextlib.suppress(queue.Empty):
        while len(taken) < most:
            taken.append(jobs.get_nowait())
    return taken


def _begin(job: Job, run: Generator[None, None, None]) -> None:
    if job.lost_source:
        raise LostSourceError("its source was never written")
    next(run)


def _end(run: Generator[None, None, None], lost: Exception | None) -> None:
    if lost is not None:
        # The error's traceback keeps the generator, which would keep the memory of a file.
        run.close()
        raise lost
    next(run, None)
