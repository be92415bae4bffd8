"""The record of a block, which outlives the process, and the journal of changes of the prefix tree."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cachemgr.types import Slot, TierKind
from protos.kvcommon.tokens import unpack

# `last_use` of all device blocks: their records are not rewritten at every use.
USED_LAST = (1 << 63) - 1


class LeaseRecord(NamedTuple):
    """A lease. `duration` and `remaining` are in seconds. `duration` is None for a lease without an end.

    `remaining` is None for a lease without an end, or whose clock has not started.
    """

    holder: str
    priority: int
    duration: float | None
    remaining: float | None
    offload_min_priority: int | None = None


class CopyRecord(NamedTuple):
    """A slot of a lower tier that has a write-through copy of a device block, and the ticket of the copy."""

    tier: TierKind
    slot: int
    generation: int


class BlockRecord(NamedTuple):
    """Everything needed to put a block back into the index. Made whenever a reader, such as the store, needs it.

    `key` and `parent_key` are 32-byte digests; `parent_key` is None at the root. `depth` counts the ancestors.
    `stored_step` is the last executor step that may have written to the block when it entered the index. `tokens` are
    packed. In a lower tier, `generation` is the ticket of the copy that filled the slot. A larger `last_use` is later.
    """

    group: int
    slot: int
    key: bytes
    parent_key: bytes | None
    depth: int
    tokens: bytes
    salt: str | None
    adapter_id: int | None
    stored_step: int
    leases: tuple[LeaseRecord, ...] = ()
    tenant_id: str | None = None
    session_id: str | None = None
    extra: bytes = b""
    tier: TierKind = TierKind.DEVICE
    generation: int = 0
    last_use: int = 0
    lower_copy: CopyRecord | None = None
    weight_version: str = ""

    @property
    def tier_slot(self) -> Slot:
        """Group, tier and slot, which no two blocks share."""
        return self.group, self.tier, self.slot

    def below(self) -> "BlockRecord | None":
        """The record of the block's lower slot. For a device block, its write-through copy, or None without a copy."""
        if self.tier is not TierKind.DEVICE or self.lower_copy is None:
            return None if self.tier is TierKind.DEVICE else self
        return self._replace(**self.lower_copy._asdict(), lower_copy=None)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids."""
        return unpack(self.tokens)


class IndexJournal(Protocol):
    """Receives every change of the prefix tree, at once and in order. Must not fail or block."""

    def cleared(self, executor_id: str, epoch: int) -> None:
        """Notes that the executor starts an epoch with an empty tree."""

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        """Notes that a block of the tree has arrived in this slot, or has changed.

        `current()` returns the block's record at the time of the call; None if the block has left the index by then.
        """

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        """Notes that the block in this slot has left the slot or the tree."""


class NoJournal:
    """A journal without a store."""

    def cleared(self, executor_id: str, epoch: int) -> None:
        pass

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        pass

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        pass
