"""The sessions of schedulers: one at a time, fenced by scheduler, by epoch, and by the cache manager's epoch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from executor.core.outbox import Session
from executor.errors import (
    ExecutorInUseError,
    SchedulerLeftError,
    SessionReplacedError,
    StaleSchedulerError,
    WrongExecutorEpochError,
)
from protos.rpc.errors import ServiceError

# The worker needs torch, which a process that only follows leases does without.
if TYPE_CHECKING:
    from executor.core.worker import Worker

# Stands for the manager's epoch if a session has not named a manager: no manager has this epoch.
UNKNOWN = (1 << 64) - 1

log = structlog.get_logger()


class SchedulerLeases:
    """What the cache manager says of schedulers."""

    def __init__(self) -> None:
        self._registered: frozenset[str] = frozenset()
        # Answers of the manager so far.
        self.answers = 0
        # How often each scheduler's registration has ended.
        self._left: Counter[str] = Counter()

    def update(self, scheduler_ids: Iterable[str]) -> None:
        """Takes the schedulers that the manager has now."""
        before, self._registered = self._registered, frozenset(scheduler_ids)
        self._left.update(before - self._registered)
        self.answers += 1

    def is_registered(self, scheduler_id: str) -> bool:
        """Returns whether the cache manager had a scheduler when it last answered."""
        return scheduler_id in self._registered

    def times_left(self, scheduler_id: str) -> int:
        """Returns how often a scheduler's registration with the cache manager has ended.

        The slots of such a scheduler go to other schedulers with the same answer or a later one.
        """
        return self._left[scheduler_id]


class Sessions:
    """Fences sessions by scheduler and epoch. On the asyncio loop."""

    def __init__(self, executor_epoch: int, leases: SchedulerLeases, worker: Worker) -> None:
        self._executor_epoch = executor_epoch
        self._leases = leases
        self._worker = worker
        # The scheduler of the last session.
        self._scheduler_id = ""
        self._scheduler_epoch = 0
        # After this many answers of the manager, at least one was certainly requested after that scheduler came.
        self._known_at = 0
        self._current: Session | None = None
        self._manager_epoch = 0
        # Why no session can be opened now: the newest counts.
        self._obstacles: list[ServiceError] = []
        self._cut_off: ServiceError | None = None

    def open(self, session: Session, *, scheduler_id: str, scheduler_epoch: int, executor_epoch: int) -> None:
        """Makes a session the current one and ends the previous session.

        The same scheduler may return after a broken stream. A different scheduler may come once the previous one's
        lease has ended: until then, its sequences run here. Raises StaleSchedulerError, WrongExecutorEpochError,
        ExecutorInUseError or the error of `suspend`, and the previous session stays.
        """
        if self._obstacles:
            raise self._obstacles[-1]
        if executor_epoch != self._executor_epoch:
            raise WrongExecutorEpochError(
                f"executor epoch {executor_epoch} is not the epoch of this executor, {self._executor_epoch}",
                fields={"open.executor_epoch": f"must be {self._executor_epoch}"},
            )
        if scheduler_epoch < self._scheduler_epoch:
            raise StaleSchedulerError(
                f"scheduler epoch {scheduler_epoch} is older than {self._scheduler_epoch}",
                fields={"open.scheduler_epoch": f"must be at least {self._scheduler_epoch}"},
            )
        if scheduler_id != self._scheduler_id and self._may_be_registered():
            raise ExecutorInUseError(
                f"the executor runs steps for scheduler {self._scheduler_id}, whose lease has not ended",
                fields={"open.scheduler_id": f"must be {self._scheduler_id}"},
                retry_after=1.0,
            )
        if scheduler_id != self._scheduler_id:
            # One answer may be in flight.
            self._known_at = self._leases.answers + 2
        self._scheduler_id, self._scheduler_epoch = scheduler_id, scheduler_epoch
        if self._current is not None:
            self._current.end(SessionReplacedError("a later session took over"))
        self._current = session

    def _may_be_registered(self) -> bool:
        """Returns whether the lease of the last session's scheduler may still be valid."""
        return self._leases.answers < self._known_at or self._leases.is_registered(self._scheduler_id)

    @property
    def scheduler_epoch(self) -> int:
        """Epoch of the newest scheduler that has opened a session; 0 before any has."""
        return self._scheduler_epoch

    @property
    def manager_epoch(self) -> int:
        """Epoch of the cache manager whose blocks running steps may write into; UNKNOWN if a session named no manager.

        0 before the first session and after `cut_off`. Stays when a session ends in any other way.
        """
        return self._manager_epoch

    def registered(self, session: Session, manager_epoch: int) -> None:
        """Notes the manager with which the session's scheduler is registered, 0 for none.

        This counts once all that was submitted earlier has ended: until then, steps of the previous session may run.
        """
        loop = asyncio.get_running_loop()

        def note() -> None:
            if session is self._current:
                self._manager_epoch = manager_epoch or UNKNOWN

        self._worker.after(lambda: loop.call_soon_threadsafe(note))

    async def cut_off(self) -> None:
        """Ends the session and refuses new sessions until `admit_again`; returns once no step runs any more."""
        if self._cut_off is None:
            self._cut_off = SchedulerLeftError(
                "the cache manager has started again, and the scheduler has not registered with it"
            )
            log.warning("session ended", cause=str(self._cut_off), scheduler_id=self._scheduler_id)
        if (session := self.suspend(self._cut_off)) is not None:
            session.end(self._cut_off)
        self._current = None
        loop, idle = asyncio.get_running_loop(), asyncio.Event()
        self._worker.after(lambda: loop.call_soon_threadsafe(idle.set))
        await idle.wait()
        self._manager_epoch = 0

    def admit_again(self) -> None:
        """Accepts sessions again after `cut_off`."""
        if self._cut_off is not None:
            self.resume(self._cut_off)
            self._cut_off = None

    def suspend(self, obstacle: ServiceError) -> Session | None:
        """Refuses new sessions with this error; returns the current session, which is to be ended, or None."""
        if obstacle not in self._obstacles:
            self._obstacles.append(obstacle)
        return self._current

    def resume(self, obstacle: ServiceError) -> None:
        """Accepts sessions again, unless they are suspended for another reason, too."""
        if obstacle in self._obstacles:
            self._obstacles.remove(obstacle)
