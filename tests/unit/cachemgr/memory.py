"""A simulated executor's memory in all tiers: per slot and offset, which tokens its K and V were computed from."""

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.types import PoolSpec, TierKind, Transfer
from tests.unit.cachemgr.live import BLOCK, GARBAGE, Live, Slot, place


class Memory:
    """What copies and steps leave, and what an executor tells of it when it registers."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.step_number = 0
        # By group, slot and offset; slots of lower tiers are pairs of tier and slot.
        self.memory: dict[tuple[int, Slot, int], tuple[object, ...]] = {}
        # Of slots of the device: the last step that wrote there.
        self.written: dict[tuple[int, int], int] = {}
        # Slots of the device that take memory, by group: what was written and not given back since.
        self.resident: set[tuple[int, int]] = set()
        # Of slots of lower tiers: the ticket of the copy that filled it, 0 when that failed.
        self.generations: dict[tuple[int, TierKind, int], int] = {}
        # And what step wrote there what the manager never hears of.
        self.untold: dict[tuple[int, int], int] = {}
        # Tickets whose copy has run, or has failed to run.
        self.done: dict[int, bool] = {}

    def lose_device(self) -> None:
        """The process is gone; lower tiers are not."""
        self.memory = {at: held for at, held in self.memory.items() if isinstance(at[1], tuple)}
        self.written.clear()
        self.resident.clear()
        self.done.clear()

    def contents(self, pools: list[PoolSpec]) -> dict[str, list[list[int]]]:
        """What a registration tells of all slots."""
        steps = [[self.written.get((pool.group, slot + 1), 0) for slot in range(pool.num_blocks)] for pool in pools]
        lower = {
            f"{tier.name.lower()}_generations": [
                [self.generations.get((pool.group, tier, slot + 1), 0) for slot in range(slots(pool))] for pool in pools
            ]
            for tier, slots in (
                (TierKind.HOST, lambda pool: pool.host_blocks),
                (TierKind.DISK, lambda pool: pool.disk_blocks),
            )
        }
        return {"last_write_steps": steps if self.written else [], **lower}

    def copy(self, copy: Transfer, fail: bool) -> None:
        self.done[copy.ticket] = not fail
        source, target = place(copy.source_tier, copy.source_slot), place(copy.target_tier, copy.target_slot)
        if copy.target_tier is TierKind.DEVICE:
            at = copy.group, copy.target_slot
            self.written[at] = self.step_number
            if copy.source_slot:
                self.resident.add(at)
            elif not fail:
                self.resident.discard(at)
        else:
            self.generations[copy.group, copy.target_tier, copy.target_slot] = 0 if fail else copy.ticket
        for offset in range(BLOCK):
            content = self.memory.get((copy.group, source, offset), GARBAGE)
            self.memory[copy.group, target, offset] = GARBAGE if fail or not copy.source_slot else content

    def write(self, live: Live, count: int) -> None:
        for group, table in enumerate(live.tables):
            for position in range(live.computed, live.computed + count):
                slot = table[position // BLOCK]
                assert slot, "a position to be computed has no block"
                self.written[group, slot] = self.step_number
                self.resident.add((group, slot))
                content = GARBAGE if live.tainted else live.expected(position)
                self.memory[group, slot, position % BLOCK] = content

    def leave_untold(self, live: Live) -> None:
        """Nobody tells what this one has computed last."""
        for group, table in enumerate(live.tables):
            self.untold |= {(group, slot): self.written.get((group, slot), 0) for slot in table}

    def has_untold(self, block: BlockRecord) -> bool:
        """Whether a slot of the device was written to without the manager's knowledge."""
        at = block.group, block.slot
        return block.tier is TierKind.DEVICE and self.written.get(at, 0) == self.untold.get(at)

    def attend(self, live: Live, count: int) -> None:
        if live.tainted:
            return
        for group, (table, window) in enumerate(zip(live.tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, live.computed - window + 1)
            for position in range(first, live.computed + count):
                slot = table[position // BLOCK]
                held = self.memory.get((group, slot, position % BLOCK))
                assert slot, f"position {position} is attended to and has no block"
                assert held == live.expected(position), f"position {position} of {live.handle} in slot {slot}: {held}"

    def check_content(self, block: BlockRecord) -> None:
        """What is findable is there, for every token of the block."""
        for offset, token in enumerate(block.token_ids):
            held = self.memory.get((block.group, place(block.tier, block.slot), offset), GARBAGE)
            assert len(held) == 2 + block.depth * BLOCK + offset + 1, f"slot {block.slot} holds {held}"
            assert held[:2] == (block.salt, block.adapter_id)
            assert (held[-1][0] if isinstance(held[-1], tuple) else held[-1]) == token
