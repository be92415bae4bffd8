"""The executors and schedulers that sequences belong to, each in one epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from cachemgr.slices import Slices, read_batches
from cachemgr.types import AccountKey, ExecutorSpec, GhostReport, Restored, SyncAnswer

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block, CacheScope
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.blocks.cache_scopes import CacheScopes
    from cachemgr.blocks.recovery import Recovery
    from cachemgr.sequences.copies import Tickets
    from cachemgr.sequences.holds import Holds
    from cachemgr.sequences.sequence import Sequence

# After blocks were missing, no optional blocks are granted for this time.
_SHORT_SECONDS = 1.0
_SCOPE = attrgetter("scope")


class GhostCaches(Protocol):
    """Simulates caches of different sizes and eviction orders from the sequences of one pool."""

    pool: BlockPool

    def admitted(self, sequence: Sequence, now: float, *, is_read: bool, source: bytes) -> None:
        """Notes that a sequence was admitted; `is_read` if it has looked for cached blocks.

        `source` is the key of the block whose first tokens the sequence copies or takes over; empty for none.
        """

    def stored(self, sequence: Sequence) -> int:
        """Returns how many leading blocks of a sequence hold the tokens of their keys."""

    def released(self, sequence: Sequence, stored: int) -> None:
        """Notes that a sequence has released its blocks, the first `stored` of which were stored."""

    def report(self, since: float | None) -> GhostReport:
        """Returns the hits of the caches since about this time; None for all time."""


class Executor:
    """One epoch of an executor."""

    def __init__(
        self,
        spec: ExecutorSpec,
        deadline: float,
        pools: list[BlockPool],
        scopes: CacheScopes,
        tickets: Tickets,
        holds: Holds,
        *,
        stores_partial: bool,
        ghosts: GhostCaches | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """`deadline` is the end of its lease. With `stores_partial`, partly filled blocks can be found.

        `recovery` is given while stored blocks are still to be restored.
        """
        self.spec = spec
        self.executor_id = spec.executor_id
        self.epoch = spec.executor_epoch
        self.block_size = spec.block_size
        self.deadline = deadline
        self.pools = pools
        self.scopes = scopes
        self.tickets = tickets
        self.holds = holds
        self.stores_partial = stores_partial
        self.ghosts = ghosts
        self.recovery = recovery
        self.sequences: dict[int, Sequence] = {}
        # When blocks were last missing, for a running or a waiting sequence.
        self.short_at = -math.inf

    def is_short(self, now: float) -> bool:
        """Whether sequences lack blocks. Schedulers retry waiting sequences several times a second."""
        return now - self.short_at < _SHORT_SECONDS

    def cached(self) -> Restored:
        """Counts indexed blocks, whether in use or not."""
        device = sum(pool.device.indexed for pool in self.pools)
        return Restored(device, sum(len(pool.tree.by_key) for pool in self.pools) - device)

    def change_accounts(self, changed: Iterable[AccountKey]) -> Slices[None]:
        """Counts the blocks of these accounts against their new quotas, after quotas were added or deleted.

        Until the slice of a block, the block counts against the earlier quota; new blocks count against the new quota.
        """
        scopes = self.scopes.outdated(changed)
        if not scopes:
            return
        for sequence in self.sequences.values():
            sequence.scope = self.scopes.current(sequence.scope)
        superseding: list[tuple[BlockPool, list[Block]]] = [(pool, []) for pool in self.pools]
        for pool, blocks in superseding:
            pool.superseding.append(blocks)
        yield
        for pool, later in superseding:
            for part in read_batches(range(len(pool.blocks))):
                self._rebook(pool, pool.blocks[part[0] : part[-1] + 1], scopes)
                yield
            # Superseding blocks may have replaced blocks that were not rebooked yet.
            self._rebook(pool, [block for block in later if pool.blocks[block.index] is block], scopes)
        for pool, blocks in superseding:
            pool.superseding = [one for one in pool.superseding if one is not blocks]

    def _rebook(self, pool: BlockPool, blocks: Iterable[Block | None], scopes: AbstractSet[CacheScope]) -> None:
        there = list(filter(None, blocks))
        # Filtered without a Python loop, since most blocks have other scopes.
        for block in compress(there, map(scopes.__contains__, map(_SCOPE, there))):
            assert block.scope is not None
            pool.rebook(block, self.scopes.current(block.scope))


class Scheduler:
    """One epoch of a scheduler."""

    def __init__(self, scheduler_id: str, epoch: int, deadline: float) -> None:
        self.scheduler_id = scheduler_id
        self.epoch = epoch
        self.deadline = deadline
        self.sequences: dict[int, Sequence] = {}
        # Names of executors in which the scheduler has had sequences.
        self.executors: set[str] = set()
        self.void: set[int] = set()
        self.sync_number = 0
        self.sync_answer = SyncAnswer()

    def has_void_sequences_in(self, executor: Executor) -> bool:
        """Whether the scheduler has sequences in an earlier registration of the executor.

        Their slots now have other users. Their steps stop once the scheduler knows they are void and releases them.
        """
        return bool(self.void) and any(
            sequence.executor is not executor and sequence.executor.executor_id == executor.executor_id
            for sequence in self.sequences.values()
        )
