"""The cache manager, which decides about every block of every executor. It is synchronous, without its own clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from cachemgr import slices
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.block_record import BlockRecord, IndexJournal, NoJournal
from cachemgr.blocks.cache_scopes import CacheScopes
from cachemgr.blocks.events import NO_BLOCK
from cachemgr.blocks.recovery import Recovery
from cachemgr.errors import (
    ExecutorLeaseError,
    ManagerRestartedError,
    PoolSpecError,
    SchedulerFirstError,
    SequenceExistsError,
    StaleExecutorError,
    StaleSchedulerError,
    SyncNumberError,
)
from cachemgr.operators.commands import OperatorCommands
from cachemgr.operators.forget import ForgetHistory
from cachemgr.operators.hints import HintRunner
from cachemgr.operators.operator_journal import Kind as EntryKind
from cachemgr.operators.operator_journal import NoOperatorJournal, OperatorJournal
from cachemgr.queries import Queries
from cachemgr.retention.bounds import check_duration
from cachemgr.retention.hint_actions import with_retention
from cachemgr.sequences.admission import (
    check_request,
    claim,
    content,
    holder,
    new_sequence,
    plan_admission,
    refusal,
)
from cachemgr.sequences.clients import Executor, GhostCaches, Scheduler
from cachemgr.sequences.copies import Tickets
from cachemgr.sequences.fork import fork
from cachemgr.sequences.holds import Holds
from cachemgr.sequences.registration import (
    MAX_SLOTS,
    check_spec,
    divide_device_memory,
    lower_tiers_survive,
    new_pools,
)
from cachemgr.sequences.release import (
    can_carry_over,
    carry_over,
    end_copies,
    end_executor,
    end_ticket,
    release,
    slots_to_zero,
    tickets_of,
    truncate,
)
from cachemgr.sequences.sequence import Sequence as LiveSequence
from cachemgr.sequences.sync import Sync
from cachemgr.sequences.token_eviction import cached_before_eviction
from cachemgr.sequences.transfers import PoolFollower, open_write_through_copies
from cachemgr.sequences.weights import reorder_blocks
from cachemgr.slices import Slices, at_once
from cachemgr.state import ManagerState
from cachemgr.types import (
    Admission,
    AdmitRequest,
    EventKind,
    ExecutorSpec,
    Freed,
    ManagerConfig,
    PinRecord,
    Restored,
    SchedulerEpoch,
    SyncAnswer,
    SyncRequest,
)
from cachemgr.validation import check_id, check_weight_version
from protos.errors import InvalidField

# Entries of lost executors that one call of `expire` frees: some milliseconds.
FREED_AT_A_TIME = 20_000


class CacheManager:
    """The calls of executors and schedulers. `queries` has all calls that read, `operators` has operators' calls.

    Every call is all or nothing: after a ServiceError, nothing has changed. Any other error is a bug and may leave a
    call half done; the process then ends.
    """

    def __init__(
        self,
        epoch: int,
        clock: Callable[[], float],
        config: ManagerConfig | None = None,
        journal: IndexJournal | None = None,
        operator_journal: OperatorJournal | None = None,
        new_ghosts: Callable[[Iterable[BlockPool], ManagerConfig], GhostCaches | None] = lambda _pools, _config: None,
    ) -> None:
        """`epoch` is positive and grows with every start of the process; handles and tickets are numbered from there.

        `clock` returns a monotonic time in seconds; every call that depends on time reads it once. `new_ghosts` makes
        the ghost caches of a registering executor from its pools.
        """
        self.epoch = epoch
        self.config = config or ManagerConfig()
        self._state = ManagerState(epoch, clock, self.config)
        self._journal = journal or NoJournal()
        self._operator_journal = operator_journal or NoOperatorJournal()
        self._new_ghosts = new_ghosts
        # Targets of ForgetBlocks, for blocks that are restored later.
        self._forgotten = ForgetHistory()
        self.queries = Queries(self._state)
        self.operators = OperatorCommands(self._state, self._forgotten, self._operator_journal)

    @property
    def begun(self) -> int:
        """Number of calls that have begun to change the state."""
        return self._state.begun

    @property
    def lost_blocks(self) -> int:
        """Number of entries of lost executors that later calls of `expire` free."""
        return len(self._state.lost_blocks)

    @property
    def is_behind(self) -> bool:
        """Whether `expire` should be called again at once."""
        is_held = any(executor.holds.is_behind for executor in self._state.executors.values())
        is_paid = not any(pool.can_withhold for pool in self._state.pools())
        return is_held or bool(self._state.unfinished_slices) or self._state.leases.is_behind or not is_paid

    def go_on(self) -> None:
        """Begins the next slice of a call, which also ends leases that are over."""
        self._state.begin()

    # Executors

    def has_old_writers(self, spec: ExecutorSpec) -> bool:
        """Whether steps of a registering executor may still write into blocks of an earlier manager."""
        return spec.steps_manager_epoch not in (0, self.epoch)

    def register_executor(
        self,
        spec: ExecutorSpec,
        stored: Iterable[BlockRecord] = (),
        pins: Iterable[PinRecord] = (),
        *,
        later: bool = False,
    ) -> Restored:
        """Registers an executor, or registers it again; returns how many cached blocks stay.

        A repeat for the registered epoch renews the lease, and takes over the version of the weights. A new epoch has
        an empty device; lower tiers keep the blocks that `spec` lists.

        `stored` and `pins` come from the store: records of this epoch or, for an older epoch, of lower tiers. `stored`
        only counts if the executor is not registered; each record is checked, and an invalid record is reported to the
        journals as removed. With `later`, both follow: blocks in calls of `restore_blocks`, pins in `end_recovery`.

        Raises InvalidField, StaleExecutorError, PoolSpecError. Raises SchedulerFirstError if blocks may be restored
        while sequences of an earlier manager may still write into them.
        """
        now = self._state.begin()
        check_spec(spec)
        known = self._state.executors.get(spec.executor_id)
        # Only a registered epoch counts: epochs are start times, and the clock may be set back between two starts.
        if known is not None and spec.executor_epoch < known.epoch:
            raise StaleExecutorError(
                f"executor {spec.executor_id} has started again since",
                fields={"executor_epoch": "is older than the registered epoch"},
            )
        deadline = now + self.config.lease_seconds
        if known is not None and known.epoch == spec.executor_epoch:
            if replace(known.spec, weight_version=spec.weight_version) != spec.without_contents():
                raise PoolSpecError(
                    "the model, memory and pools of one epoch do not change",
                    fields={"pools": "differ from the registered pools, or other settings differ"},
                )
            known.deadline = deadline
            # The executor knows best: it may not have switched to the weights that it announced.
            at_once(self._use_weights(known, spec.weight_version))
            return known.cached()
        stored = [] if known is not None else list(stored)
        later = later or (known is not None and known.recovery is not None)
        if (stored or (later and spec.has_contents)) and self.has_old_writers(spec):
            raise SchedulerFirstError
        if not stored and not later:
            self._journal.cleared(spec.executor_id, spec.executor_epoch)
        executor = self._enter_executor(spec, known, deadline, stored, later=later)
        if not later:
            self._end_recovery(executor, pins)
        return executor.cached()

    def _enter_executor(
        self, spec: ExecutorSpec, known: Executor | None, deadline: float, stored: list[BlockRecord], *, later: bool
    ) -> Executor:
        """Enters a new epoch, with the pools of the last epoch if its lower tiers survive."""
        before = known if known is not None and lower_tiers_survive(known.spec, spec) else None
        if known is not None and before is None:
            known.holds.end_pins()
            self._end_executor(known)
        self._state.events.add(EventKind.EXECUTOR_REGISTERED, NO_BLOCK, executor=spec.without_contents())
        report_pin = partial(self._operator_journal.operator_changed, EntryKind.PIN, executor_id=spec.executor_id)
        holds = before.holds if before else Holds(self._state.next_number, self.config.pin_budget, report_pin)
        scopes = (
            before.scopes if before else CacheScopes(spec.model_fingerprint, self._state.accounts, spec.weight_version)
        )
        tickets = Tickets(self._state.next_number)
        follower = PoolFollower(tickets, holds)
        if before is not None:
            pools = before.pools
            carry_over(before, spec, follower)
        else:
            pools = new_pools(self.config, self._state.events, self._state.leases, self._journal, spec, follower)
            for pool in pools:
                pool.lru_clock = self._state.uses
        self._state.number_after(spec)
        recovery = self._recovery(spec, known, pools, scopes, needed=later or bool(stored))
        if recovery is not None:
            for record in sorted(stored, key=lambda record: record.depth):
                recovery.restore(record)
        # Before pins are restored and ghost caches are made: pin budget and sampling rate depend on the pools' sizes.
        divide_device_memory(pools, spec, self._state.shares)
        executor = Executor(
            spec.without_contents(),
            deadline,
            pools,
            scopes,
            tickets,
            holds,
            stores_partial=self.config.partial_reuse or self.config.copy_on_partial_reuse,
            ghosts=self._new_ghosts(pools, self.config),
            recovery=recovery,
        )
        self._state.executors[spec.executor_id] = executor
        if before is not None and scopes.weight_version != spec.weight_version:
            scopes.weight_version = spec.weight_version
            at_once(reorder_blocks(executor, self._state.leases))
        return executor

    def _recovery(
        self, spec: ExecutorSpec, known: Executor | None, pools: list[BlockPool], scopes: CacheScopes, *, needed: bool
    ) -> Recovery | None:
        """Makes the recovery of a registering executor; None unless blocks may be restored or must be overwritten."""
        # Taken out in any case, since neither applies to later blocks.
        to_zero = self._forgotten.to_zero(spec.executor_id)
        purged = self._forgotten.purged(spec.executor_id)
        if not needed and not to_zero:
            return None
        if known is not None and known.recovery is not None:
            purged = known.recovery.purged
        forgotten, is_deleted = self._forgotten.of(spec), self._state.rules.is_deleted
        recovery = Recovery(spec, pools, scopes, self._journal, self._state.leases, is_deleted, forgotten, purged)
        recovery.overwrite(to_zero)
        return recovery

    def is_too_large_to_carry_over(self, spec: ExecutorSpec) -> bool:
        """Whether a restarted executor has too many slots to carry over in one call, so that `end_epoch` comes first.

        False during a recovery, when the store lacks changes, and if holds would be lost, which are in no store.
        """
        known = self._state.executors.get(spec.executor_id)
        if known is None or spec.executor_epoch <= known.epoch or not lower_tiers_survive(known.spec, spec):
            return False
        if known.recovery is not None or any(not hold.pin for hold in known.holds):
            return False
        return not can_carry_over(known, spec)

    def end_epoch(self, executor_id: str, executor_epoch: int) -> None:
        """Ends an epoch whose executor has restarted, as the end of its lease would.

        Blocks of its lower tiers are restored from the store when the executor registers.
        """
        self._state.begin()
        executor = self._state.executors.get(executor_id)
        if executor is not None and executor.epoch == executor_epoch:
            self._end_executor(executor)
            del self._state.executors[executor_id]

    def is_recovering(self, executor_id: str) -> bool:
        """Whether blocks of an executor have yet to be restored."""
        executor = self._state.executors.get(executor_id)
        return executor is not None and executor.recovery is not None

    def cached_blocks(self, executor_id: str) -> Restored:
        """Counts the indexed blocks of an executor; 0 for an unknown executor."""
        executor = self._state.executors.get(executor_id)
        return Restored(0, 0) if executor is None else executor.cached()

    def restore_blocks(self, executor_id: str, executor_epoch: int, stored: Iterable[BlockRecord]) -> None:
        """Restores a part of the stored blocks. Over all calls, parents come before their children.

        Invalid blocks are reported to the journal as removed. Does nothing without a recovery of this epoch.
        """
        self._state.begin()
        executor = self._state.executors.get(executor_id)
        if executor is None or executor.epoch != executor_epoch or executor.recovery is None:
            return
        for record in stored:
            executor.recovery.restore(record)

    def end_recovery(self, executor_id: str, executor_epoch: int, pins: Iterable[PinRecord] = ()) -> None:
        """Ends the restoring of blocks, and restores `pins` whose blocks are cached again.

        Does nothing without a recovery of this epoch.
        """
        self._state.begin()
        executor = self._state.executors.get(executor_id)
        if executor is not None and executor.epoch == executor_epoch and executor.recovery is not None:
            self._end_recovery(executor, pins)

    def _end_recovery(self, executor: Executor, pins: Iterable[PinRecord]) -> None:
        if executor.recovery is not None:
            executor.recovery.end()
            executor.recovery = None
        executor.holds.restore_pins(pins, executor.pools, self._state.leases.now)

    def _end_executor(self, executor: Executor) -> None:
        # Stored blocks of this executor count as used before all later blocks.
        self._state.uses = max(self._state.uses, *(pool.lru_clock for pool in executor.pools)) + MAX_SLOTS
        if executor.recovery is None:
            self._forgotten.lost(executor.executor_id)
        else:
            self._forgotten.lost_in_recovery(executor.executor_id, executor.recovery.purged)
        self._forgotten.not_zeroed(executor.executor_id, slots_to_zero(executor))
        end_executor(executor, self._state.events, self._state.lost_blocks)

    def renew_executor(self, executor_id: str, executor_epoch: int, manager_epoch: int) -> None:
        """Renews the lease, and begins write-through copies.

        Raises ExecutorLeaseError or ManagerRestartedError if the executor must register again.
        """
        now = self._state.begin()
        if manager_epoch != self.epoch:
            raise ManagerRestartedError(
                "the cache manager has started again: register", fields={"manager_epoch": f"is not {self.epoch}"}
            )
        executor = self._state.executors.get(executor_id)
        if executor is None or executor.epoch != executor_epoch:
            raise ExecutorLeaseError(
                f"executor {executor_id} is not registered with this epoch",
                fields={"executor_id" if executor is None else "executor_epoch": "is not registered"},
            )
        executor.deadline = now + self.config.lease_seconds
        open_write_through_copies(executor)

    def update_weights(self, executor_id: str, executor_epoch: int, weight_version: str) -> Slices[int]:
        """Notes that an executor computes with new weights from now on; returns how many cached blocks are outdated.

        Returns 0 if the version has not changed. Raises InvalidField, UnknownExecutorError, StaleExecutorError.
        """
        self._state.begin()
        check_weight_version(weight_version)
        return (yield from self._use_weights(self._executor_of(executor_id, executor_epoch), weight_version))

    def _use_weights(self, executor: Executor, weight_version: str) -> Slices[int]:
        if weight_version == executor.spec.weight_version:
            return 0
        executor.spec = replace(executor.spec, weight_version=weight_version)
        executor.scopes.weight_version = weight_version
        # Watchers learn the executor's new keys.
        self._state.events.add(EventKind.EXECUTOR_REGISTERED, NO_BLOCK, executor=executor.spec)
        return (yield from reorder_blocks(executor, self._state.leases))

    def _executor_of(self, executor_id: str, executor_epoch: int) -> Executor:
        """Raises UnknownExecutorError, StaleExecutorError."""
        executor = self._state.executor(executor_id)
        if executor.epoch != executor_epoch:
            raise StaleExecutorError(
                f"executor {executor_id} is registered with another epoch",
                fields={"executor_epoch": f"is not {executor.epoch}"},
            )
        return executor

    def confirm_transfers(
        self,
        executor_id: str,
        executor_epoch: int,
        tickets: Sequence[int],
        failed_tickets: Sequence[int],
        step: int = 0,
    ) -> int:
        """Ends copies by their tickets; returns how many tickets were not open.

        `step`: the last step that may have written for these copies.

        Raises UnknownExecutorError, StaleExecutorError.
        """
        self._state.begin()
        return end_copies(self._executor_of(executor_id, executor_epoch), tickets, failed_tickets, step)

    # Schedulers and sequences

    def register_scheduler(self, scheduler_id: str, scheduler_epoch: int) -> None:
        """Registers a scheduler; a newer epoch releases the sequences of the older epoch.

        A repeat for the same epoch renews the lease. If there are very many blocks, later calls of `expire` release
        them. Raises InvalidField, StaleSchedulerError.
        """
        now = self._state.begin()
        check_id("scheduler_id", scheduler_id)
        if scheduler_epoch < 1:
            raise InvalidField("scheduler_epoch", "must be at least 1")
        known = self._state.schedulers.get(scheduler_id)
        deadline = now + self.config.lease_seconds
        if known is not None and scheduler_epoch < known.epoch:
            raise StaleSchedulerError(
                f"scheduler {scheduler_id} has started again since",
                fields={"scheduler_epoch": "is older than the registered epoch"},
                metadata={"newest_epoch": str(known.epoch)},
            )
        if known is not None and scheduler_epoch == known.epoch:
            known.deadline = deadline
            return
        if known is not None:
            self._release_all(known)
        self._state.schedulers[scheduler_id] = Scheduler(scheduler_id, scheduler_epoch, deadline)

    def admit(self, request: AdmitRequest) -> Admission:
        """Matches, claims and allocates; renews the scheduler's lease.

        A repeat for an admitted sequence with equal content gets the same answer, and does not renew the lease.

        Raises InvalidField, UnknownExecutorError, UnknownSchedulerError, StaleSchedulerError, SequenceExistsError,
        SequenceTooLongError, RulePolicyError.
        """
        now = self._state.begin()
        tokens = check_request(request)
        request = with_retention(request)
        scheduler = self._state.scheduler(request.scheduler_id, request.scheduler_epoch)
        executor = self._state.executor(request.executor_id)
        existing = self._state.sequences.get(request.sequence_id)
        if existing is not None:
            return _repeated(existing, scheduler, content(request, tokens))
        if scheduler.has_void_sequences_in(executor):
            scheduler.deadline = now + self.config.lease_seconds
            return _refused(Admission(False, missing_blocks=1), executor, now)
        sequence = new_sequence(request, tokens, scheduler, executor, self._state.rules, self.config)
        plan = plan_admission(request, sequence, self.config)
        scheduler.deadline = now + self.config.lease_seconds
        if plan.missing_blocks:
            missing = plan.missing_without_ceiling(sequence, self.config)
            return _refused(refusal(plan.missing_blocks, missing, sequence.scope.account), executor, now)
        sequence.content = content(request, tokens)
        sequence.admission = claim(request, sequence, plan, self._state.next_number(), self.config, now)
        self._enter(sequence)
        if request.hints is not None:
            keys = [sequence.key(index) for index in range(len(tokens) // executor.block_size)]
            runner = HintRunner([(executor, keys)], holder(request), self.config, now, request.tenant_id)
            answers = tuple(runner.run(request.hints, later=True))
            sequence.admission = replace(sequence.admission, hint_answers=answers)
        return sequence.admission

    def sync(self, request: SyncRequest) -> SyncAnswer:
        """Takes progress and grants capacity. A repeat of the last number gets the same answer.

        Raises InvalidField, UnknownSchedulerError, StaleSchedulerError, ManagerRestartedError, SyncNumberError.
        """
        now = self._state.begin()
        if request.manager_epoch != self.epoch:
            raise ManagerRestartedError(
                "the handles belong to another process of the cache manager",
                fields={"manager_epoch": f"is not {self.epoch}"},
            )
        scheduler = self._state.scheduler(request.scheduler_id, request.scheduler_epoch)
        if scheduler.sync_number and request.sync_number == scheduler.sync_number:
            scheduler.deadline = now + self.config.lease_seconds
            return scheduler.sync_answer
        if request.sync_number != scheduler.sync_number + 1:
            raise SyncNumberError(
                f"expected sync {scheduler.sync_number + 1}",
                fields={"sync_number": f"is not {scheduler.sync_number + 1}"},
                metadata={"expected": str(scheduler.sync_number + 1)},
            )
        sync = Sync(request, scheduler, self._state.executors, self.config)
        sync.check()
        scheduler.deadline = now + self.config.lease_seconds
        answer = sync.apply(now)
        self._state.evicted.update(sync.evicted)
        self._state.windows.update(sync.windows)
        for sequence in sync.released:
            del self._state.sequences[sequence.sequence_id]
        # Both together and last, so that a repeat gets the answer of this number or none.
        scheduler.sync_number, scheduler.sync_answer = request.sync_number, answer
        return answer

    def truncate(self, caller: SchedulerEpoch, sequence_id: str, num_tokens: int) -> Freed:
        """Drops a sequence's tokens from a length on. All computed tokens must have been reported first.

        `found` in the answer is false for an unknown sequence. Raises UnknownSchedulerError, StaleSchedulerError,
        InvalidField, SharedBlockError, WindowPassedError, VoidSequenceError, SequenceEvictsError.
        """
        self._state.begin()
        sequence = self._state.own_sequence(caller, sequence_id)
        return Freed(False) if sequence is None else truncate(sequence, num_tokens)

    def fork(
        self, caller: SchedulerEpoch, parent_sequence_id: str, sequence_id: str, num_tokens: int | None = None
    ) -> Admission:
        """Starts a second sequence that shares the blocks of the first for its first `num_tokens` tokens, or all.

        Raises UnknownSchedulerError, StaleSchedulerError, InvalidField, UnknownSequenceError, SequenceExistsError,
        VoidSequenceError, SequenceUnsettledError, WindowPassedError, SequenceEvictsError.
        """
        now = self._state.begin()
        check_id("sequence_id", sequence_id)
        scheduler = self._state.scheduler(*caller)
        existing = self._state.sequences.get(sequence_id)
        if existing is not None:
            return _repeated(existing, scheduler, ("fork", parent_sequence_id, num_tokens))
        parent = self._state.live_sequence(caller, parent_sequence_id, "parent_sequence_id")
        found = fork(parent, sequence_id, num_tokens, self.config, self._state.next_number)
        if isinstance(found, Admission):
            return _refused(found, parent.executor, now)
        self._enter(found)
        return found.admission

    def hold(self, caller: SchedulerEpoch, sequence_id: str, owner: str, duration: float) -> int:
        """Keeps a sequence's blocks for `duration` seconds after its release; returns how many blocks.

        If the sequence has evicted tokens, keeps the blocks that were cached earlier. Raises UnknownSchedulerError,
        StaleSchedulerError, InvalidField, UnknownSequenceError, VoidSequenceError.
        """
        self._state.begin()
        check_id("owner", owner)
        check_duration("duration", duration)
        sequence = self._state.live_sequence(caller, sequence_id)
        sequence.holds[owner] = duration
        if sequence.has_evicted_tokens:
            return sum(1 for _ in cached_before_eviction(sequence))
        return sum(block is not None for table in sequence.tables for block in table.blocks)

    def expire(self, late: float = 0.0) -> None:
        """Ends leases and holds whose time is over. Must be called a few times per lease duration.

        Also runs a slice of an unfinished call, frees some blocks of lost executors, and withholds some slots of pools
        that shrink.

        `late`: how many seconds longer than planned the manager did not run. A manager that does not run receives no
        renewals, so the leases of schedulers and executors are extended by that time. Holds and retention durations are
        not extended.
        """
        now = self._state.begin()
        if self._state.unfinished_slices:
            self._state.run_in_slices(self._state.unfinished_slices.popleft())
        owners: list[Scheduler | Executor] = [*self._state.schedulers.values(), *self._state.executors.values()]
        for owner in owners:
            owner.deadline = min(owner.deadline + late, now + self.config.lease_seconds)
        for scheduler_id, scheduler in list(self._state.schedulers.items()):
            if scheduler.deadline < now:
                self._release_all(scheduler)
                del self._state.schedulers[scheduler_id]
        for executor_id, executor in list(self._state.executors.items()):
            executor.holds.expire(now)
            if executor.deadline < now:
                self._end_executor(executor)
                del self._state.executors[executor_id]
        self._state.lost_blocks.free_some(FREED_AT_A_TIME)
        for pool in self._state.pools():
            if pool.can_withhold:
                pool.withhold_part()

    # Helpers of the calls above

    def _enter(self, sequence: LiveSequence) -> None:
        self._state.sequences[sequence.sequence_id] = sequence
        sequence.executor.sequences[sequence.handle] = sequence
        sequence.scheduler.sequences[sequence.handle] = sequence
        self._forgotten.sequence_admitted(sequence)

    def _release_all(self, scheduler: Scheduler) -> None:
        """Releases the sequences of a lost or restarted scheduler in slices. From now on, no call can name them."""
        for sequence in scheduler.sequences.values():
            del self._state.sequences[sequence.sequence_id]
        self._state.run_in_slices(self._release_in_slices(scheduler))

    def _release_in_slices(self, scheduler: Scheduler) -> Slices[None]:
        touched = 0
        sequences = list(scheduler.sequences.values())[::-1]
        # Freeing a million blocks in one call would stall all other calls.
        while sequences:
            sequence = sequences.pop()
            if touched >= slices.LOOKS:
                touched = 0
                yield
            touched += sequence.num_blocks
            release(sequence, self._state.leases.now)
        for executor in list(self._state.executors.values()):
            for ticket in tickets_of(executor, scheduler):
                if touched >= slices.LOOKS:
                    touched = 0
                    yield
                touched += slices.LOOKS // slices.CHANGES
                end_ticket(executor, ticket)


def _refused(answer: Admission, executor: Executor, now: float) -> Admission:
    """Returns the answer, and notes a shortage if the request waits for a reason other than a quota."""
    if answer.full_account is None:
        executor.short_at = now
    return answer


def _repeated(existing: LiveSequence, scheduler: Scheduler, content: object) -> Admission:
    if existing.scheduler is not scheduler or existing.content != content:
        raise SequenceExistsError(
            f"sequence {existing.sequence_id} exists with other content or for another scheduler",
            fields={"sequence_id": "is in use for other content or by another scheduler"},
        )
    return existing.admission
