"""Who may send steps: one session at a time, of one scheduler."""

from collections.abc import Callable

from executor.core.worker import Session
from executor.errors import (
    ExecutorInUseError,
    SessionReplacedError,
    StaleSchedulerError,
    StoppingError,
    WrongExecutorEpochError,
)


class Sessions:
    """Fences sessions by scheduler and epoch. `is_registered`: whether the cache manager has a scheduler of an id."""

    def __init__(self, executor_epoch: int, is_registered: Callable[[str], bool]) -> None:
        self._executor_epoch = executor_epoch
        self._is_registered = is_registered
        # Whose session the last one was.
        self._scheduler_id = ""
        self._scheduler_epoch = 0
        self._current: Session | None = None
        self._stopping = False

    def open(self, session: Session, *, scheduler_id: str, scheduler_epoch: int, executor_epoch: int) -> None:
        """Makes it the current one and ends the one before. The same scheduler may come again after a broken stream.

        Another scheduler may come once the lease of the one before has ended: until then that one's sequences run here.
        Raises StaleSchedulerError, WrongExecutorEpochError, ExecutorInUseError or StoppingError; then the one
        before stays.
        """
        if self._stopping:
            raise StoppingError("the executor is stopping")
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
        if scheduler_id != self._scheduler_id and self._is_registered(self._scheduler_id):
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
        """The newest scheduler's that has opened a session; 0 before."""
        return self._scheduler_epoch

    def stop(self) -> Session | None:
        """Refuses new sessions from now on; returns the current one, for it to be ended."""
        self._stopping = True
        return self._current
