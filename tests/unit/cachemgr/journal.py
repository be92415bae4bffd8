"""A store that is a dictionary."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.types import TierKind


@dataclass
class Journal:
    """Keeps what a store would: the indexed blocks by place."""

    epoch: int = 0
    blocks: dict[tuple[int, TierKind, int], BlockRecord] = field(default_factory=dict)
    # What reached the store some time ago.
    written: dict[tuple[int, TierKind, int], BlockRecord] = field(default_factory=dict)

    # False while blocks that were remembered are not told: they may be gone from here already.
    is_read: bool = True

    def cleared(self, executor_id: str, epoch: int) -> None:
        self.epoch = epoch
        self.blocks.clear()
        self.written.clear()

    def flush(self) -> None:
        """All changes up to now reach the store."""
        self.written = dict(self.blocks)

    def fall_back(self) -> None:
        """Changes since the last flush are lost."""
        self.blocks = dict(self.written)

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        block = current()
        assert block is not None
        assert block.place == (group, tier, slot)
        self.blocks[block.place] = block

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        if self.is_read:
            del self.blocks[group, tier, slot]
        else:
            self.blocks.pop((group, tier, slot), None)


def timeless(block: BlockRecord) -> BlockRecord:
    """The journal does not hear of every second: only whether a clock runs."""
    leases = (lease._replace(remaining=None if lease.remaining is None else 0.0) for lease in block.leases)
    return block._replace(leases=tuple(leases))
