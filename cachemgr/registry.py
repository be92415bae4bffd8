"""Who is there: executors with their pools, schedulers with their sequences, and holds."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from cachemgr.api import ExecutorSpec, SyncAnswer
from cachemgr.keys import Domain

if TYPE_CHECKING:
    from cachemgr.block import Block
    from cachemgr.pool import Pool
    from cachemgr.sequence import Sequence
    from cachemgr.transfers import Ticket


class Executor:
    """One epoch of an executor."""

    def __init__(self, spec: ExecutorSpec, pools: list[Pool], deadline: float) -> None:
        self.spec = spec
        self.executor_id = spec.executor_id
        self.epoch = spec.executor_epoch
        self.block_size = spec.block_size
        self.pools = pools
        self.deadline = deadline
        self.sequences: dict[int, Sequence] = {}
        self.tickets: dict[int, Ticket] = {}
        self.holds: list[Hold] = []
        self._domains: WeakValueDictionary[tuple[str | None, int | None], Domain] = WeakValueDictionary()

    def domain(self, salt: str | None, adapter_id: int | None) -> Domain:
        """One object per salt and adapter, as long as something is stored under it."""
        domain = self._domains.get((salt, adapter_id))
        if domain is None:
            domain = Domain(self.spec.model_fingerprint, salt, adapter_id)
            self._domains[salt, adapter_id] = domain
        return domain


class Scheduler:
    """One epoch of a scheduler."""

    def __init__(self, scheduler_id: str, epoch: int, deadline: float) -> None:
        self.scheduler_id = scheduler_id
        self.epoch = epoch
        self.deadline = deadline
        self.sequences: dict[int, Sequence] = {}
        # Names of executors that it has had sequences in.
        self.executors: set[str] = set()
        self.void: set[int] = set()
        self.sync_number = 0
        self.sync_answer = SyncAnswer()

    def may_write_to_lost(self, executor: Executor) -> bool:
        """Whether it has sequences in an earlier registration of the executor, whose slots are others' by now.

        Their steps stop when the scheduler has heard that they are void and has released them.
        """
        return bool(self.void) and any(
            sequence.executor is not executor and sequence.executor.executor_id == executor.executor_id
            for sequence in self.sequences.values()
        )


class Hold:
    """Blocks that stay after their sequence is released, until the last owner's time is over."""

    def __init__(self, blocks: list[tuple[Pool, Block]], owners: dict[str, float]) -> None:
        self.blocks = blocks
        # Owner to the time at which its hold ends.
        self.owners = owners
