"""Who hears of every change of the prefix index."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cachemgr.blocks.block_record import BlockRecord
    from cachemgr.types import TierKind


class IndexJournal(Protocol):
    """Hears of every change of the prefix index, at once and in order. Must not fail or block."""

    def cleared(self, executor_id: str, epoch: int) -> None:
        """The executor starts an epoch with an empty index."""

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        """A block of the index came to this place, or the one there changed.

        `current` tells what is there when it is called; None when the block is gone by then.
        """

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        """The block at this place left it, or the index."""


class NoJournal:
    """Keeps nothing."""

    def cleared(self, executor_id: str, epoch: int) -> None:
        """Forgets it."""

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        """Forgets it."""

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        """Forgets it."""
