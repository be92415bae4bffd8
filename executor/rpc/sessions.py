"""The sessions of schedulers: one at a time, fenced by scheduler and epoch."""

from typing import Protocol

from executor.core.outbox import Session
from executor.errors import (
    ExecutorInUseError,
    SessionReplacedError,
    StaleSchedulerError,
    WrongExecutorEpochError,
)
from protos.rpc.errors import ServiceError


class SchedulerLeases(Protocol):
    """What the cache manager says of schedulers."""

    def is_registered(self, scheduler_id: str) -> bool:
        """Whether it had a scheduler when it answered last."""
        ...

    def times_left(self, scheduler_id: str) -> int:
        """How often it has had a scheduler no more that it had before."""
        ...


class Sessions:
    """Fences sessions by scheduler and epoch."""

    def __init__(self, executor_epoch: int, leases: SchedulerLeases) -> None:
        self._executor_epoch = executor_epoch
        self._leases = leases
        # Of the last session.
        self._scheduler_id = ""
        self._scheduler_epoch = 0
        self._current: Session | None = None
        # Why none can be opened now.
        self._obstacle: ServiceError | None = None

    def open(self, session: Session, *, scheduler_id: str, scheduler_epoch: int, executor_epoch: int) -> None:
        """Makes a session the current one and ends the session before.

        The same scheduler may come again after a broken stream. Another scheduler may come when the lease of the one
        before has ended: until then its sequences run here. Raises StaleSchedulerError, WrongExecutorEpochError,
        ExecutorInUseError or what they are suspended with, and the session before stays.
        """
        if self._obstacle is not None:
            raise self._obstacle
        if executor_epoch != self._executor_epoch:
            raise WrongExecutorEpochError(
                f"executor epoch {executor_epoch} is not this one's, {self._executor_epoch}",
                fields={"open.executor_epoch": f"must be {self._executor_epoch}"},
            )
        if scheduler_epoch < self._scheduler_epoch:
            raise StaleSchedulerError(
                f"scheduler epoch {scheduler_epoch} is older than {self._scheduler_epoch}",
                fields={"open.scheduler_epoch": f"must be at least {self._scheduler_epoch}"},
            )
        if scheduler_id != self._scheduler_id and self._leases.is_registered(self._scheduler_id):
            raise ExecutorInUseError(
                f"the executor runs steps for scheduler {self._scheduler_id}, whose lease has not ended",
                fields={"open.scheduler_id": f"must be {self._scheduler_id}"},
                retry_after=1.0,
            )
        self._scheduler_id, self._scheduler_epoch = scheduler_id, scheduler_epoch
        if self._current is not None:
            self._current.end(SessionReplacedError("a later session took over"))
        self._current = session

    @property
    def scheduler_epoch(self) -> int:
        """Epoch of the newest scheduler that has opened a session; 0 before."""
        return self._scheduler_epoch

    def suspend(self, obstacle: ServiceError) -> Session | None:
        """Refuses new sessions with this error from now on; returns the current one, for it to be ended."""
        self._obstacle = obstacle
        return self._current

    def resume(self, obstacle: ServiceError) -> None:
        """Accepts sessions again, unless they are suspended for another reason since."""
        if self._obstacle is obstacle:
            self._obstacle = None
