"""A simulated executor's memory: for every slot of every tier, the tokens that its K and V were computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cachemgr.types import PoolSpec, TierKind

# The content of a slot that was never written or was overwritten, or whose copy has failed.
GARBAGE = None


class Content(NamedTuple):
    """Everything that a token's K and V depend on: salt, adapter, weights, and all earlier tokens, `before` as a hash.

    A token that stands for a part of an image comes with the image's digest and the position in the image.
    """

    scope: tuple[str | None, int | None, str]
    first: int
    position: int
    token: tuple[int, Any]
    before: int


def contents(
    scope: tuple[str | None, int | None, str], tokens: Sequence[int], extra_keys: Iterable[Any] = ()
) -> list[Content]:
    """The content that computing each token leaves."""
    images = {key.start + at: (key.digest, at) for key in extra_keys for at in range(key.length)}
    found: list[Content] = []
    for position, token in enumerate(tokens):
        before = hash(found[-1]) if found else 0
        found.append(Content(scope, tokens[0], position, (token, images.get(position)), before))
    return found


class Device:
    """Runs copies and steps, and reports its slots' contents at a registration. Transfers are objects or messages."""

    def __init__(self, block_size: int, windows: Sequence[int | None], device_tier: int = TierKind.DEVICE) -> None:
        self.block_size = block_size
        self.windows = windows
        self._tier = device_tier
        # A list by group, tier and slot, with an entry for each token.
        self.memory: dict[tuple[int, int, int], list[Any]] = {}
        # The last step that wrote to a slot of the device.
        self.written: dict[tuple[int, int], int] = {}
        # Slots of the device that take memory, with their group: written and not released since.
        self.resident: set[tuple[int, int]] = set()
        # The ticket of the copy that filled a slot of a lower tier, 0 after a failed copy.
        self.generations: dict[tuple[int, int, int], int] = {}

    def lose(self) -> None:
        """The process has ended; lower tiers stay."""
        self.memory = {place: held for place, held in self.memory.items() if place[1] != self._tier}
        self.written.clear()
        self.resident.clear()

    def registered(self, pools: Sequence[PoolSpec]) -> dict[str, list[list[int]]]:
        """A registration's report about all slots."""
        steps = [[self.written.get((pool.group, slot + 1), 0) for slot in range(pool.num_blocks)] for pool in pools]
        lower = {
            f"{tier.name.lower()}_generations": [
                [self.generations.get((pool.group, tier, slot + 1), 0) for slot in range(size)]
                for pool, size in zip(pools, sizes, strict=True)
            ]
            for tier, sizes in (
                (TierKind.HOST, [pool.host_blocks for pool in pools]),
                (TierKind.DISK, [pool.disk_blocks for pool in pools]),
            )
        }
        return {"last_write_steps": steps if self.written else [], **lower}

    def slot(self, group: int, tier: int, slot: int) -> list[Any]:
        """The content of a slot, token by token."""
        return self.memory.setdefault((group, tier, slot), [GARBAGE] * self.block_size)

    def held(self) -> list[Any]:
        """The contents of all slots."""
        return [one for slot in self.memory.values() for one in slot if one is not GARBAGE]

    def count(self, salt: str | None, first: int) -> int:
        """Tokens in any tier that come from a prompt with this salt and first token."""
        return sum(isinstance(one, Content) and (one.scope[0], one.first) == (salt, first) for one in self.held())

    def copy(self, transfer: Any, step: int = 0, *, failed: bool = False) -> None:
        """Runs a copy of a whole block. Without a source it overwrites its target; a failed copy leaves garbage."""
        group, slot = transfer.group, transfer.target_slot
        if transfer.target_tier == self._tier:
            self.written[group, slot] = step
            if transfer.source_slot:
                self.resident.add((group, slot))
            elif not failed:
                self.resident.discard((group, slot))
        else:
            self.generations[group, transfer.target_tier, slot] = 0 if failed else transfer.ticket
        empty = failed or not transfer.source_slot
        source = [] if empty else self.slot(group, transfer.source_tier, transfer.source_slot)
        self.memory[group, transfer.target_tier, slot] = list(source) or [GARBAGE] * self.block_size

    def write(
        self, tables: Sequence[Sequence[int]], expected: Sequence[Any], start: int, end: int, step: int = 0
    ) -> None:
        """Computes positions [start, end)."""
        for group, table in enumerate(tables):
            for position in range(start, end):
                slot = table[position // self.block_size]
                assert slot, f"position {position} is to be computed and has no block in group {group}"
                self.written[group, slot] = step
                self.resident.add((group, slot))
                self.slot(group, self._tier, slot)[position % self.block_size] = expected[position]

    def read(self, tables: Sequence[Sequence[int]], expected: Sequence[Any], start: int, end: int) -> None:
        """Checks that a step that computes [start, end) finds everything that it attends to."""
        for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
            for position in range(0 if window is None else max(0, start - window + 1), end):
                slot = table[position // self.block_size]
                assert slot, f"position {position} is attended to and has no block in group {group}"
                held = self.slot(group, self._tier, slot)[position % self.block_size]
                assert held == expected[position], f"slot {slot} of group {group}: not position {position}, but {held}"
