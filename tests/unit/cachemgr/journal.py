"""A store that is a dictionary."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cachemgr.records import BlockRecord


@dataclass
class Journal:
    """Keeps what a store would: the indexed blocks by place."""

    epoch: int = 0
    blocks: dict[tuple[int, int], BlockRecord] = field(default_factory=dict)

    def cleared(self, executor_id: str, epoch: int) -> None:
        self.epoch = epoch
        self.blocks.clear()

    def stored(self, executor_id: str, group: int, slot: int, current: Callable[[], BlockRecord | None]) -> None:
        block = current()
        assert block is not None
        assert (block.group, block.slot) == (group, slot)
        self.blocks[group, slot] = block

    def removed(self, executor_id: str, group: int, slot: int) -> None:
        del self.blocks[group, slot]


def timeless(block: BlockRecord) -> BlockRecord:
    """The journal does not hear of every second: only whether a clock runs."""
    leases = (lease._replace(remaining=None if lease.remaining is None else 0.0) for lease in block.leases)
    return block._replace(leases=tuple(leases))
