"""The cache manager: decides about every block of every executor. Synchronous, single-threaded, no clock of its own."""

from collections.abc import Iterable, Iterator, Sequence

from cachemgr.api import (
    Admission,
    AdmitRequest,
    BlockFilter,
    BlockView,
    Event,
    ExecutorSpec,
    Extension,
    Freed,
    IndexJournal,
    ManagerConfig,
    NoJournal,
    PoolView,
    PoolViolation,
    Purged,
    SequenceView,
    Snapshot,
    SyncAnswer,
    SyncRequest,
)
from cachemgr.records import BlockRecord


class CacheManager:
    """Every call is all or nothing: after an error nothing has changed. `now` is a monotonic time in seconds."""

    def __init__(self, epoch: int, config: ManagerConfig | None = None, journal: IndexJournal | None = None) -> None:
        """`epoch` is positive and grows with every start of the process: handles and tickets are numbered from it."""
        self.epoch = epoch
        self.config = config or ManagerConfig()
        self._journal = journal or NoJournal()

    # Executors

    def knows_executor(self, executor_id: str, executor_epoch: int) -> bool:
        """False when a registration of this epoch should bring what the store remembers."""
        raise NotImplementedError

    def register_executor(self, spec: ExecutorSpec, now: float, remembered: Iterable[BlockRecord] = ()) -> int:
        """Registers an executor, or registers it again; returns the cached blocks that are valid on the device.

        `remembered` is what the store has for this epoch; it is used when `knows_executor` is false, checked entry
        by entry, and what does not hold is reported to the journal as removed.
        Raises InvalidField, StaleExecutorError, PoolSpecError.
        """
        raise NotImplementedError

    def renew_executor(self, executor_id: str, executor_epoch: int, manager_epoch: int, now: float) -> None:
        """Keeps the lease. Raises ExecutorLeaseError or ManagerRestartedError when it must register again."""
        raise NotImplementedError

    def confirm_transfers(
        self, executor_id: str, executor_epoch: int, tickets: Sequence[int], failed_tickets: Sequence[int]
    ) -> int:
        """Ends tickets; returns how many of them were not open. Raises UnknownExecutorError, StaleExecutorError."""
        raise NotImplementedError

    def records(self, executor_id: str) -> Iterator[BlockRecord]:
        """Every indexed block of an executor, parents before children; nothing for an unknown one."""
        raise NotImplementedError

    # Schedulers and sequences

    def register_scheduler(self, scheduler_id: str, scheduler_epoch: int, now: float) -> None:
        """Registers a scheduler; a newer epoch frees what the older held. Raises InvalidField, StaleSchedulerError."""
        raise NotImplementedError

    def admit(self, request: AdmitRequest, now: float) -> Admission:
        """Matches, claims and allocates. Repeated with the same content it gives the same answer.

        Raises InvalidField, UnknownExecutorError, UnknownSchedulerError, StaleSchedulerError, SequenceExistsError,
        SequenceTooLongError.
        """
        raise NotImplementedError

    def sync(self, request: SyncRequest, now: float) -> SyncAnswer:
        """Takes progress and gives capacity. Repeating the last number gives its answer again.

        Raises InvalidField, UnknownSchedulerError, StaleSchedulerError, ManagerRestartedError, SyncNumberError.
        """
        raise NotImplementedError

    def extend(self, sequence_id: str, capacity_tokens: int) -> Extension:
        """Grows one sequence. Raises UnknownSequenceError, VoidSequenceError, SequenceTooLongError."""
        raise NotImplementedError

    def truncate(self, sequence_id: str, num_tokens: int) -> Freed:
        """Forgets tokens from a length on. Raises InvalidField, SharedBlockError, WindowPassedError."""
        raise NotImplementedError

    def fork(self, parent_sequence_id: str, sequence_id: str) -> Admission:
        """Starts a second sequence with the first one's tokens and blocks.

        Raises InvalidField, UnknownSequenceError, SequenceExistsError, VoidSequenceError.
        """
        raise NotImplementedError

    def hold(self, sequence_id: str, owner: str, duration: float) -> int:
        """Keeps a sequence's blocks for `duration` seconds from its release on; returns how many.

        Raises InvalidField, UnknownSequenceError.
        """
        raise NotImplementedError

    def release(self, sequence_id: str, now: float) -> Freed:
        """Gives a sequence's blocks back."""
        raise NotImplementedError

    def expire(self, now: float) -> None:
        """Ends leases and holds whose time is over. Call it a few times per lease."""
        raise NotImplementedError

    # Admin and events

    def check_pool(self, pool_id: str = "") -> list[PoolViolation]:
        """Recounts a pool, or all of them, from scratch. Raises UnknownPoolError."""
        raise NotImplementedError

    def pools(self) -> list[PoolView]:
        """All pools by name."""
        raise NotImplementedError

    def pool(self, pool_id: str) -> PoolView:
        """One pool. Raises UnknownPoolError."""
        raise NotImplementedError

    def blocks(self, pool_id: str, after_slot: int = 0) -> Iterator[BlockView]:
        """Used and cached blocks by slot. Raises UnknownPoolError."""
        raise NotImplementedError

    def sequences(self, after_handle: int = 0) -> Iterator[SequenceView]:
        """Live sequences by handle."""
        raise NotImplementedError

    def purge(self, selected: BlockFilter, *, validate_only: bool) -> Purged:
        """Drops cached blocks with the blocks behind them. Raises InvalidField, UnknownPoolError."""
        raise NotImplementedError

    @property
    def last_event(self) -> int:
        """Number of the newest event, 0 before the first."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """The cache at `last_event`."""
        raise NotImplementedError

    def events_after(self, number: int, limit: int = 1000) -> list[Event]:
        """Events number+1, number+2, … as many as there are. Raises EventsGoneError."""
        raise NotImplementedError
