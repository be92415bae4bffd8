"""The cache manager: decides about every block of every executor. Synchronous, single-threaded, no clock of its own."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cachemgr.admin import ManagerAdmin
from cachemgr.admin_api import PoolShare, Prefix
from cachemgr.admission import Admitter, check_length
from cachemgr.admit_request import check_request, content, holder
from cachemgr.api import (
    AccountKey,
    Admission,
    AdmitRequest,
    ExecutorSpec,
    Extension,
    Freed,
    ManagerConfig,
    Restored,
    SchedulerEpoch,
    SyncAnswer,
    SyncRequest,
)
from cachemgr.errors import (
    ExecutorLeaseError,
    InvalidField,
    ManagerRestartedError,
    PoolSpecError,
    SchedulerFirstError,
    SequenceExistsError,
    SequenceUnsettledError,
    StaleExecutorError,
    StaleSchedulerError,
    SyncNumberError,
)
from cachemgr.events import EventLog
from cachemgr.evicting import check_fork, left_behind
from cachemgr.executors import check_spec, new_pools, outlives, share_memory
from cachemgr.ghosts import ghosts_of
from cachemgr.hints import HintRunner
from cachemgr.journal import IndexJournal, NoJournal
from cachemgr.leases import LeaseBook
from cachemgr.lifecycle import carry_over, end_copies, end_tickets, lose, release, truncate
from cachemgr.operator_records import PinRecord
from cachemgr.records import BlockRecord
from cachemgr.registry import Executor, Scheduler
from cachemgr.remembering import NoOperatorJournal, OperatorJournal
from cachemgr.restoring import restore
from cachemgr.retention import check_duration
from cachemgr.rules import RuleBook
from cachemgr.sequence import Sequence as LiveSequence
from cachemgr.sequence import blocks_for
from cachemgr.syncing import Sync
from cachemgr.tiers import Account
from cachemgr.validation import check_id
from cachemgr.views import unknown_executor
from protos.kvcache.eviction import Kind


class CacheManager(ManagerAdmin):
    """Every call is all or nothing: after an error nothing has changed."""

    def __init__(
        self,
        epoch: int,
        clock: Callable[[], float],
        config: ManagerConfig | None = None,
        journal: IndexJournal | None = None,
        operator_journal: OperatorJournal | None = None,
    ) -> None:
        """`epoch` is positive and grows with every start of the process: handles and tickets are numbered from it.

        `clock` gives a monotonic time in seconds; every call that depends on time reads it once.
        """
        self.epoch = epoch
        self._clock = clock
        self.config = config or ManagerConfig()
        self._journal = journal or NoJournal()
        self._operator_journal = operator_journal or NoOperatorJournal()
        # Numbers of handles and tickets, never given twice, also not by a later manager process.
        self._number = epoch << 20 if epoch < 1 << 43 else epoch
        self._events = EventLog(self.config.event_history)
        self._leases = LeaseBook(self._events)
        self._rules = RuleBook(self._next_number)
        self._accounts: dict[AccountKey, Account] = {}
        # By pool: what operators changed at run time.
        self._shares: dict[str, PoolShare] = {}
        self._admitter = Admitter(self.config, self._rules, self._next_number)
        self._executors: dict[str, Executor] = {}
        self._schedulers: dict[str, Scheduler] = {}
        # A scheduler registers once none of its steps can write into blocks that an earlier manager gave it.
        self._scheduler_came = False
        # Sequences that have begun to evict tokens.
        self._evicted: Counter[Kind] = Counter()
        # Live sequences by id, in the order of their handles.
        self._sequences: dict[str, LiveSequence] = {}

    def _now(self) -> float:
        """The time, once every lease that it ends has ended: each call that changes something begins with it."""
        self._leases.advance(self._clock())
        return self._leases.now

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _number_behind(self, remembered: Iterable[BlockRecord]) -> None:
        """Gives no number again by which a slot of a lower tier is known: the clock may be behind that of the epoch."""
        told = (block.generation for block in remembered)
        self._number = max(self._number, *(number for number in told if number < 1 << 63), 0)

    # Executors

    @property
    def scheduler_came(self) -> bool:
        """Whether blocks of an earlier manager can be believed to be written no more."""
        return self._scheduler_came

    def knows_executor(self, executor_id: str) -> bool:
        """False when a registration should bring what the store remembers."""
        return executor_id in self._executors

    def register_executor(
        self, spec: ExecutorSpec, remembered: Iterable[BlockRecord] = (), pins: Iterable[PinRecord] = ()
    ) -> Restored:
        """Registers an executor, or registers it again; returns the cached blocks that count after it.

        A newer epoch has an empty device, and of lower tiers what it tells of. `remembered` is what the store has for
        this epoch, or of lower tiers for an older one, and `pins` of them; they are used when `knows_executor` is
        false, checked entry by entry, and what does not hold is reported to the journals as removed.
        Raises InvalidField, StaleExecutorError, PoolSpecError, and SchedulerFirstError when there is something to
        remember and sequences of an earlier manager may still be writing.
        """
        now = self._now()
        check_spec(spec)
        known = self._executors.get(spec.executor_id)
        # The epoch ends with the lease: the clock that epochs are taken from may go back between two starts.
        if known is not None and spec.executor_epoch < known.epoch:
            raise StaleExecutorError(
                f"executor {spec.executor_id} has started again since", fields={"executor_epoch": "is an older one"}
            )
        deadline = now + self.config.lease_seconds
        if known is not None and known.epoch == spec.executor_epoch:
            if known.spec != spec.without_contents():
                raise PoolSpecError("the pools of one epoch do not change", fields={"pools": "are not those of before"})
            known.deadline = deadline
            return known.cached()
        remembered = [] if known is not None else list(remembered)
        if remembered and not self._scheduler_came:
            raise SchedulerFirstError
        if not remembered:
            self._journal.cleared(spec.executor_id, spec.executor_epoch)
        before = known if known is not None and outlives(known.spec, spec) else None
        if known is not None and before is None:
            self._lose_pins(known)
            lose(known)
        pools = before.pools if before else new_pools(spec, self.config, self._events, self._leases, self._journal)
        budget = self.config.pin_budget
        executor = Executor(spec, pools, deadline, self._next_number, budget, self._accounts, before)
        if before is not None:
            carry_over(before, executor)
        executor.change_accounts()
        self._executors[spec.executor_id] = executor
        if remembered:
            self._number_behind(remembered)
            restore(executor, remembered, self._journal, self._leases)
            self._end_leases_of_deleted_rules(executor)
        share_memory(executor, self._shares)
        executor.ghosts = ghosts_of(pools, self.config.ghost_sample)
        self._restore_pins(executor, pins if known is None else ())
        executor.spec = spec.without_contents()
        return executor.cached()

    def renew_executor(self, executor_id: str, executor_epoch: int, manager_epoch: int) -> None:
        """Keeps the lease, and begins backups.

        Raises ExecutorLeaseError or ManagerRestartedError when it must register again.
        """
        now = self._now()
        if manager_epoch != self.epoch:
            raise ManagerRestartedError(
                "the cache manager has started again: register", fields={"manager_epoch": f"is not {self.epoch}"}
            )
        executor = self._executors.get(executor_id)
        if executor is None or executor.epoch != executor_epoch:
            raise ExecutorLeaseError(
                f"executor {executor_id} is not registered with this epoch",
                fields={"executor_id" if executor is None else "executor_epoch": "is not registered"},
            )
        executor.deadline = now + self.config.lease_seconds
        executor.copies.back_up()

    def confirm_transfers(
        self,
        executor_id: str,
        executor_epoch: int,
        tickets: Sequence[int],
        failed_tickets: Sequence[int],
        step: int = 0,
    ) -> int:
        """Ends tickets, of copies that no step behind this one has written for; returns how many were not open.

        Raises UnknownExecutorError, StaleExecutorError.
        """
        self._now()
        executor = self._executors.get(executor_id)
        if executor is None:
            raise unknown_executor(executor_id)
        if executor.epoch != executor_epoch:
            raise StaleExecutorError(
                f"executor {executor_id} is registered with another epoch",
                fields={"executor_epoch": f"is not {executor.epoch}"},
            )
        return end_copies(executor, tickets, failed_tickets, step)

    # Schedulers and sequences

    def register_scheduler(self, scheduler_id: str, scheduler_epoch: int) -> None:
        """Registers a scheduler; a newer epoch frees what the older held. Raises InvalidField, StaleSchedulerError."""
        now = self._now()
        check_id("scheduler_id", scheduler_id)
        if scheduler_epoch < 1:
            raise InvalidField("scheduler_epoch", "must be at least 1")
        known = self._schedulers.get(scheduler_id)
        deadline = now + self.config.lease_seconds
        if known is not None and scheduler_epoch < known.epoch:
            raise StaleSchedulerError(
                f"scheduler {scheduler_id} has started again since",
                fields={"scheduler_epoch": "is an older one"},
                metadata={"newest_epoch": str(known.epoch)},
            )
        if known is not None and scheduler_epoch == known.epoch:
            known.deadline = deadline
            return
        if known is not None:
            self._release_all(known, now)
        self._schedulers[scheduler_id] = Scheduler(scheduler_id, scheduler_epoch, deadline)
        self._scheduler_came = True

    def admit(self, request: AdmitRequest) -> Admission:
        """Matches, claims and allocates; renews the scheduler's lease. The same content gives the same answer.

        Raises InvalidField, UnknownExecutorError, UnknownSchedulerError, StaleSchedulerError, SequenceExistsError,
        SequenceTooLongError.
        """
        now = self._now()
        tokens = check_request(request)
        scheduler = self._scheduler(request.scheduler_id, request.scheduler_epoch)
        executor = self._executors.get(request.executor_id)
        if executor is None:
            raise unknown_executor(request.executor_id)
        existing = self._sequences.get(request.sequence_id)
        if existing is not None:
            return _repeated(existing, scheduler, content(request, tokens))
        found = self._admitter.admit(request, tokens, scheduler, executor, now)
        scheduler.deadline = now + self.config.lease_seconds
        if not isinstance(found, Admission) and request.hints is not None:
            prefix = Prefix(tokens, executor.executor_id, request.salt, request.adapter_id, request.extra_keys)
            runner = HintRunner([executor], prefix, holder(request), self.config, now, request.tenant_id)
            answers = tuple(runner.run(request.hints, later=True))
            found.admission = replace(found.admission, hint_answers=answers)
        return self._enter(found)

    def sync(self, request: SyncRequest) -> SyncAnswer:
        """Takes progress and gives capacity. Repeating the last number gives its answer again.

        Raises InvalidField, UnknownSchedulerError, StaleSchedulerError, ManagerRestartedError, SyncNumberError.
        """
        now = self._now()
        if request.manager_epoch != self.epoch:
            raise ManagerRestartedError(
                "the handles belong to another process of the cache manager",
                fields={"manager_epoch": f"is not {self.epoch}"},
            )
        scheduler = self._scheduler(request.scheduler_id, request.scheduler_epoch)
        if scheduler.sync_number and request.sync_number == scheduler.sync_number:
            scheduler.deadline = now + self.config.lease_seconds
            return scheduler.sync_answer
        if request.sync_number != scheduler.sync_number + 1:
            raise SyncNumberError(
                f"expected sync {scheduler.sync_number + 1}",
                fields={"sync_number": f"is not {scheduler.sync_number + 1}"},
                metadata={"expected": str(scheduler.sync_number + 1)},
            )
        sync = Sync(request, scheduler, self._executors, self.config, self._admitter)
        sync.check()
        scheduler.deadline = now + self.config.lease_seconds
        scheduler.sync_number = request.sync_number
        scheduler.sync_answer = sync.apply(now)
        self._evicted.update(sync.evicted)
        for sequence in sync.released:
            del self._sequences[sequence.sequence_id]
        return scheduler.sync_answer

    def extend(self, caller: SchedulerEpoch, sequence_id: str, capacity_tokens: int) -> Extension:
        """Grows one sequence, by no more than its eviction policy lets it use.

        As all calls that name a sequence, it is for the scheduler that admitted it, under its newest epoch.
        Raises UnknownSchedulerError, StaleSchedulerError, UnknownSequenceError, VoidSequenceError,
        SequenceTooLongError.
        """
        self._now()
        sequence = self._live(caller, sequence_id)
        executor = sequence.executor
        usable = capacity_tokens if sequence.eviction is None else sequence.eviction.usable(capacity_tokens)
        check_length(executor, usable, "capacity_tokens")
        start = sequence.num_blocks
        wanted = max(start, blocks_for(usable, executor.block_size))
        account = sequence.domain.account
        # What runs goes on beyond its ceiling, at the cost of its own cached blocks first.
        free = [pool.device.free_for(account, within_ceiling=False) for pool in executor.pools]
        short = sum(max(0, wanted - start - one) for one in free)
        if short:
            return Extension(False, short, (), sequence.capacity)
        self._admitter.grow(sequence, wanted)
        return Extension(True, 0, sequence.slots(start), sequence.capacity, sequence.take_transfers())

    def truncate(self, caller: SchedulerEpoch, sequence_id: str, num_tokens: int) -> Freed:
        """Forgets tokens from a length on. All that was computed must have been reported before.

        Raises UnknownSchedulerError, StaleSchedulerError, InvalidField, SharedBlockError, WindowPassedError,
        VoidSequenceError, SequenceEvictsError.
        """
        self._now()
        sequence = self._own(caller, sequence_id)
        return Freed(False) if sequence is None else truncate(sequence, num_tokens)

    def fork(
        self, caller: SchedulerEpoch, parent_sequence_id: str, sequence_id: str, num_tokens: int | None = None
    ) -> Admission:
        """Starts a second sequence with the first one's tokens, or so many of them, and blocks.

        Raises UnknownSchedulerError, StaleSchedulerError, InvalidField, UnknownSequenceError, SequenceExistsError,
        VoidSequenceError, SequenceUnsettledError, WindowPassedError, SequenceEvictsError.
        """
        self._now()
        check_id("sequence_id", sequence_id)
        scheduler = self._scheduler(*caller)
        existing = self._sequences.get(sequence_id)
        if existing is not None:
            return _repeated(existing, scheduler, ("fork", parent_sequence_id, num_tokens))
        parent = self._live(caller, parent_sequence_id, "parent_sequence_id")
        check_fork(parent)
        full = parent.computed // parent.block_size
        if parent.tickets or any(table.settled < full for table in parent.tables):
            raise SequenceUnsettledError(
                f"sequence {parent_sequence_id} waits for a copy or a shared prefix",
                fields={"parent_sequence_id": "names one that waits"},
            )
        return self._enter(self._admitter.fork(parent, sequence_id, num_tokens))

    def hold(self, caller: SchedulerEpoch, sequence_id: str, owner: str, duration: float) -> int:
        """Keeps a sequence's blocks for `duration` seconds from its release on; returns how many.

        Of one that has evicted tokens it keeps what it computed before, as far as that is cached.
        Raises UnknownSchedulerError, StaleSchedulerError, InvalidField, UnknownSequenceError.
        """
        self._now()
        check_id("owner", owner)
        check_duration("duration", duration)
        sequence = self._live(caller, sequence_id)
        sequence.holds[owner] = duration
        if sequence.has_moved:
            return sum(1 for _ in left_behind(sequence))
        return sum(block is not None for table in sequence.tables for block in table.blocks)

    def release(self, caller: SchedulerEpoch, sequence_id: str) -> Freed:
        """Gives a sequence's blocks back. Raises UnknownSchedulerError, StaleSchedulerError."""
        now = self._now()
        sequence = self._own(caller, sequence_id)
        if sequence is None:
            return Freed(False)
        del self._sequences[sequence_id]
        return release(sequence, now)

    def expire(self, late: float = 0.0) -> None:
        """Ends leases and holds whose time is over. Call it a few times per lease.

        `late` is for how many seconds longer than planned the manager has not run: it could hear no renewal meanwhile,
        so the leases of schedulers and executors last longer by that time. Holds and retention durations do not:
        callers ask for those in time that passes whether the manager runs or not.
        """
        now = self._now()
        owners: list[Scheduler | Executor] = [*self._schedulers.values(), *self._executors.values()]
        for owner in owners:
            owner.deadline = min(owner.deadline + late, now + self.config.lease_seconds)
        for scheduler_id, scheduler in list(self._schedulers.items()):
            if scheduler.deadline < now:
                self._release_all(scheduler, now)
                del self._schedulers[scheduler_id]
        for executor_id, executor in list(self._executors.items()):
            executor.holds.expire(now)
            if executor.deadline < now:
                lose(executor)
                del self._executors[executor_id]

    # What the calls above share

    def _enter(self, sequence: LiveSequence | Admission) -> Admission:
        if isinstance(sequence, Admission):
            return sequence
        self._sequences[sequence.sequence_id] = sequence
        sequence.executor.sequences[sequence.handle] = sequence
        sequence.scheduler.sequences[sequence.handle] = sequence
        return sequence.admission

    def _release_all(self, scheduler: Scheduler, now: float) -> None:
        for sequence in list(scheduler.sequences.values()):
            del self._sequences[sequence.sequence_id]
            release(sequence, now)
        for executor in self._executors.values():
            end_tickets(executor, scheduler)


def _repeated(existing: LiveSequence, scheduler: Scheduler, content: object) -> Admission:
    if existing.scheduler is not scheduler or existing.content != content:
        raise SequenceExistsError(
            f"sequence {existing.sequence_id} exists with other content",
            fields={"sequence_id": "is in use for other content"},
        )
    return existing.admission
