"""A cache manager with one executor and one scheduler, driven without a device or a model."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from cachemgr.manager import CacheManager
from cachemgr.sequences.admission import grow
from cachemgr.sequences.token_eviction_state import blocks_for
from cachemgr.telemetry.ghost_cache import ghosts_of
from cachemgr.types import (
    Admission,
    AdmitRequest,
    ExecutorSpec,
    ManagerConfig,
    PoolSpec,
    PoolView,
    SchedulerEpoch,
    SyncAnswer,
)
from cachemgr.types import SyncRequest as Request

# No lease is renewed here, so neither the executor nor the scheduler may ever count as lost.
CONFIG = ManagerConfig(lease_seconds=math.inf)
# The one scheduler.
CALLER = SchedulerEpoch("s", 1)


class Driver:
    """One pool with full attention. `now` is the manager's clock in seconds."""

    def __init__(self, num_blocks: int, *, block_size: int = 16, config: ManagerConfig = CONFIG) -> None:
        self.now = 0.0
        self.manager = CacheManager(1, lambda: self.now, config, new_ghosts=ghosts_of)
        self.manager.register_scheduler(*CALLER)
        self.manager.register_executor(ExecutorSpec("e", 1, "m", bytes(32), block_size, [PoolSpec(0, num_blocks)]))
        self._syncs = 0

    @property
    def pool(self) -> PoolView:
        """The pool with its counters."""
        return self.manager.queries.pools()[0]

    def admit(self, name: str, tokens: Sequence[int], **options: object) -> Admission:
        """Asks for the blocks of a prompt."""
        return self.manager.admit(AdmitRequest(name, "s", 1, "e", tokens, **options))  # type: ignore[arg-type]

    def sync(
        self,
        computed: dict[int, int] | None = None,
        new_tokens: Sequence[Sequence[int]] | None = None,
        released: Iterable[int] = (),
    ) -> SyncAnswer:
        """Reports computed tokens by handle, the tokens that each sequence generated, and ended sequences."""
        computed = computed or {}
        new_tokens = new_tokens or [()] * len(computed)
        self._syncs += 1
        return self.manager.sync(
            Request(
                "s",
                1,
                self.manager.epoch,
                self._syncs,
                step=self._syncs,
                handles=list(computed),
                computed_tokens=list(computed.values()),
                new_token_counts=[len(tokens) for tokens in new_tokens],
                new_token_ids=[token for tokens in new_tokens for token in tokens],
                released_handles=list(released),
            )
        )

    def reserve(self, handle: int, capacity_tokens: int) -> None:
        """Allocates all blocks of a sequence now; a scheduler gets them sync by sync."""
        sequence = next(self.manager.queries.sequences(handle - 1))
        grow(sequence, blocks_for(capacity_tokens, sequence.block_size))

    def confirm(self, admission: Admission) -> None:
        """Reports that the device has run the copies of an admission."""
        self.manager.confirm_transfers("e", 1, [copy.ticket for copy in admission.transfers], [])

    def cache(self, name: str, tokens: Sequence[int], **options: object) -> Admission:
        """Admits a prompt, computes it and releases it."""
        admission = self.admit(name, tokens, **options)
        assert admission.admitted
        self.confirm(admission)
        self.sync({admission.sequence_handle: len(tokens)}, released=[admission.sequence_handle])
        return admission


def prompt(number: int, length: int) -> array[int]:
    """Returns tokens that no prompt with a different number has."""
    return array("I", range(number * length, (number + 1) * length))
