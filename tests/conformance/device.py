"""An executor's memory: for every token's place in every tier, what its K and V were computed from."""

from collections.abc import Iterable, Sequence

from protos.kvcache.v1 import kvcache_pb2 as pb


def contents(root: object, tokens: Sequence[int], extra: Sequence[pb.ExtraKey]) -> list[int]:
    """What computing each token leaves: it depends on the domain and on everything before."""
    found, last = [], hash(root)
    for position, token in enumerate(tokens):
        piece = next((key for key in extra if key.start <= position < key.start + key.length), None)
        beside = None if piece is None else (position - piece.start, piece.digest)
        last = hash((last, token, beside))
        found.append(last)
    return found


class Device:
    """Runs copies in order and keeps what sequences compute."""

    def __init__(self, block_size: int, windows: list[int | None]) -> None:
        self._size = block_size
        self._windows = windows
        # By group, tier, slot and offset in the block.
        self._memory: dict[tuple[int, int, int, int], int | None] = {}

    def copy(self, transfers: Iterable[pb.Transfer]) -> None:
        """Runs transfers; one without a source overwrites its target with nothing."""
        for transfer in transfers:
            for offset in range(transfer.num_tokens or self._size):
                source = (transfer.group, transfer.source_tier, transfer.source_slot, offset)
                held = self._memory.get(source) if transfer.source_slot else None
                self._memory[transfer.group, transfer.target_tier, transfer.target_slot, offset] = held

    def compute(self, tables: list[list[int]], expected: list[int], start: int, end: int) -> None:
        """Computes positions [start, end): writes them, and reads everything that they attend to."""
        for group, table in enumerate(tables):
            for position in range(start, end):
                slot = table[position // self._size]
                assert slot, f"position {position} is to be computed and has no block"
                self._memory[group, pb.TIER_DEVICE, slot, position % self._size] = expected[position]
        self.check(tables, expected, start, end)

    def check(self, tables: list[list[int]], expected: list[int], start: int, end: int) -> None:
        """Whether a step that computes [start, end) finds what it attends to."""
        for group, (table, window) in enumerate(zip(tables, self._windows, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                slot = table[position // self._size]
                assert slot, f"position {position} is attended to and has no block in group {group}"
                held = self._memory.get((group, pb.TIER_DEVICE, slot, position % self._size))
                assert held == expected[position], f"slot {slot} of group {group} has another position {position}"
