"""The state that the manager, its queries and its commands share."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from cachemgr.blocks.block import Accounts
from cachemgr.blocks.events import EventLog
from cachemgr.blocks.lost_blocks import LostBlocks
from cachemgr.errors import (
    StaleSchedulerError,
    UnknownExecutorError,
    UnknownPoolError,
    UnknownSchedulerError,
    UnknownSequenceError,
    VoidSequenceError,
)
from cachemgr.retention.bounds import MAX_PRIORITY
from cachemgr.retention.leases import LeaseBook
from cachemgr.retention.rule_book import RuleBook
from cachemgr.sequences.prefix_match import cached_blocks_of
from cachemgr.sequences.registration import MAX_SLOTS
from cachemgr.types import PoolView, TierUsage
from cachemgr.validation import check_extra_keys, check_id, check_tokens
from protos.errors import InvalidField

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor, Scheduler
    from cachemgr.sequences.sequence import Sequence
    from cachemgr.slices import Slices
    from cachemgr.types import BlockFilter, ExecutorSpec, ManagerConfig, PoolShare, Prefix, SchedulerEpoch, WindowChange
    from protos.kvcommon.eviction import Kind


class ManagerState:
    """Executors, schedulers, sequences and rules, and the lookup of each by name."""

    def __init__(self, epoch: int, clock: Callable[[], float], config: ManagerConfig) -> None:
        self.epoch = epoch
        self.clock = clock
        self.config = config
        # The last number of a handle or ticket. No number is given twice, not even by a later manager process.
        self.number = epoch << 20 if epoch < 1 << 43 else epoch
        # The first LRU time of a new pool, after the times of all blocks that may be stored.
        self.uses = self.number + MAX_SLOTS
        # Number of calls that have begun to change something.
        self.begun = 0
        self.events = EventLog(config.event_history)
        self.leases = LeaseBook(self.events)
        self.rules = RuleBook(self.next_number)
        self.accounts = Accounts()
        # Shares that operators have set, by pool.
        self.shares: dict[str, PoolShare] = {}
        self.executors: dict[str, Executor] = {}
        self.schedulers: dict[str, Scheduler] = {}
        # Live sequences by id, in order of their handles.
        self.sequences: dict[str, Sequence] = {}
        # Number of sequences that have begun to evict tokens, by kind of policy.
        self.evicted: Counter[Kind] = Counter()
        # Number of changes of adaptive windows.
        self.windows: Counter[WindowChange] = Counter()
        self.lost_blocks = LostBlocks(self.leases)
        # Unfinished calls; each call of `expire` runs a slice.
        self.unfinished_slices: deque[Slices[None]] = deque()

    def begin(self) -> float:
        """Ends some leases that are over, and returns the time. Each call that changes something begins with this."""
        self.begun += 1
        self.leases.advance(self.clock())
        return self.leases.now

    def next_number(self) -> int:
        """A number that no handle, ticket or name has had yet."""
        self.number += 1
        return self.number

    def number_after(self, spec: ExecutorSpec) -> None:
        """Skips the numbers of filled slots in lower tiers: the clock may have been set back before this epoch.

        Ignores numbers from 2^63 on, which no manager gives.
        """
        for slots in chain(spec.host_generations, spec.disk_generations):
            newest = max(slots, default=0)
            if newest >= 1 << 63:
                newest = max((number for number in slots if number < 1 << 63), default=0)
            self.number = max(self.number, newest)

    def run_in_slices(self, call: Slices[None]) -> None:
        """Runs the first slice of a call now; calls of `expire` run the remaining slices."""
        for _ in call:
            self.unfinished_slices.append(call)
            return

    def executor(self, executor_id: str, field: str = "executor_id") -> Executor:
        """Returns a registered executor. Raises UnknownExecutorError."""
        executor = self.executors.get(executor_id)
        if executor is None:
            raise UnknownExecutorError(f"executor {executor_id} is not registered", fields={field: "is not registered"})
        return executor

    def pools(self, pool_id: str = "", field: str = "pool_id") -> list[BlockPool]:
        """All pools by name, or the named pool. Raises UnknownPoolError."""
        if pool_id:
            return [self.pool(pool_id, field)]
        return sorted(
            (pool for executor in self.executors.values() for pool in executor.pools), key=lambda pool: pool.pool_id
        )

    def pool(self, pool_id: str, field: str = "pool_id") -> BlockPool:
        """Raises UnknownPoolError."""
        for executor in self.executors.values():
            for pool in executor.pools:
                if pool.pool_id == pool_id:
                    return pool
        raise UnknownPoolError(f"there is no pool {pool_id!r}", fields={field: "is not known"})

    def check_prefix(self, path: str, prefix: Prefix) -> list[Executor]:
        """The executors that may have a prefix. Raises InvalidField, UnknownExecutorError."""
        check_tokens(f"{path}.token_ids", prefix.token_ids)
        if prefix.salt is not None:
            check_id(f"{path}.salt", prefix.salt)
        check_extra_keys(f"{path}.extra_keys", prefix.extra_keys, len(prefix.token_ids))
        if not prefix.executor_id:
            return list(self.executors.values())
        return [self.executor(prefix.executor_id, f"{path}.executor_id")]

    def filtered(
        self, selected: BlockFilter, field: str = "pool_id"
    ) -> list[tuple[Executor, BlockPool, set[Block] | None]]:
        """Pools that a filter selects, each with its executor and the blocks of the filter's prefix, None without one.

        `field` names the pool of the filter in errors. Raises InvalidField, UnknownPoolError, UnknownExecutorError.
        """
        for name in ("salt", "session_id", "tenant_id"):
            value = getattr(selected, name)
            if value is not None:
                check_id(f"filter.{name}", value)
        if selected.max_priority is not None and not 0 <= selected.max_priority <= MAX_PRIORITY:
            raise InvalidField("filter.max_retention_priority", f"must be between 0 and {MAX_PRIORITY}")
        prefix = selected.prefix
        having = self.executors.values() if prefix is None else self.check_prefix("filter.prefix", prefix)
        pools = self.pools(selected.pool_id, field)
        return [
            (executor, pool, None if prefix is None else set(cached_blocks_of(executor, pool, prefix)))
            for executor in having
            for pool in executor.pools
            if pool in pools
        ]

    def scheduler(self, scheduler_id: str, scheduler_epoch: int) -> Scheduler:
        """Returns a registered scheduler. Raises UnknownSchedulerError, StaleSchedulerError."""
        scheduler = self.schedulers.get(scheduler_id)
        if scheduler is None:
            raise UnknownSchedulerError(
                f"scheduler {scheduler_id} is not registered", fields={"scheduler_id": "is not registered"}
            )
        if scheduler.epoch != scheduler_epoch:
            raise StaleSchedulerError(
                f"scheduler {scheduler_id} is registered with another epoch",
                fields={"scheduler_epoch": f"is not {scheduler.epoch}"},
            )
        return scheduler

    def own_sequence(self, caller: SchedulerEpoch, sequence_id: str) -> Sequence | None:
        """A sequence of the caller; None if it is unknown or belongs to another scheduler.

        Raises UnknownSchedulerError, StaleSchedulerError.
        """
        scheduler = self.scheduler(*caller)
        sequence = self.sequences.get(sequence_id)
        return sequence if sequence is not None and sequence.scheduler is scheduler else None

    def live_sequence(self, caller: SchedulerEpoch, sequence_id: str, field: str = "sequence_id") -> Sequence:
        """Like `own_sequence`. Also raises UnknownSequenceError and VoidSequenceError."""
        sequence = self.own_sequence(caller, sequence_id)
        if sequence is None:
            raise UnknownSequenceError(f"there is no sequence {sequence_id!r}", fields={field: "is not known"})
        if sequence.void:
            raise VoidSequenceError(
                f"sequence {sequence_id} can only be released",
                fields={field: "names a sequence that can only be released"},
            )
        return sequence


def pool_view(pool: BlockPool) -> PoolView:
    """A pool with its counters."""
    device = pool.device
    return PoolView(
        pool_id=pool.pool_id,
        executor_id=pool.executor_id,
        spec=pool.spec,
        block_size=pool.block_size,
        total_blocks=device.total,
        free_blocks=device.free,
        used_blocks=device.used,
        cached_blocks=device.cached,
        evicted_blocks=device.counters.evicted,
        queried_tokens=pool.tokens.total.queried,
        hit_tokens=pool.tokens.total.hit,
        lower_tiers=tuple(
            TierUsage(
                tier.kind,
                tier.total,
                tier.free,
                tier.used,
                tier.cached,
                len(pool.write_through.copies) if tier is pool.write_through.tier else 0,
            )
            for tier in pool.tiers[1:]
            if tier.size
        ),
        etag=str(pool.share_number),
    )
