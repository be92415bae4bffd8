"""How the pools of a model's layer groups share the memory for keys and values."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from executor.errors import ModelError

# Tokens that a cache manager with default settings gives a running sequence ahead of need.
AHEAD_TOKENS = 32


@dataclass(frozen=True)
class Shares:
    """Blocks per layer group, not counting the null blocks.

    blocks: what each pool may use at first. slots: what each pool has; more than its blocks if an operator may move
    memory to it later. memory_bytes: what all pools use together at most; None if each has its slots permanently.
    """

    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    memory_bytes: int | None = None

    @classmethod
    def fixed(cls, blocks: Sequence[int]) -> "Shares":
        """Returns pools with permanent numbers of blocks."""
        return cls(tuple(blocks), tuple(blocks))


def share_memory(
    windows: Sequence[int | None],
    block_bytes: Sequence[int],
    memory_bytes: int,
    block_size: int,
    *,
    expected_tokens: int,
    longest_tokens: int,
    weights: Sequence[float] = (),
    movable: bool = False,
) -> Shares:
    """Divides `memory_bytes`, which hold at least one block of each group.

    windows: attention window of each group in tokens, None for full attention. weights: given shares of the bytes;
    if empty, the bytes are shared as sequences of `expected_tokens` need them. Each pool then gets at least the blocks
    of a prompt of `longest_tokens`, or the number of blocks that equal pools would have if this is less. movable:
    whether pools get slots to grow into; never with weights or a single group.
    Raises ModelError if the weights do not fit the groups, or leave a group without a block.
    """
    if weights:
        return Shares.fixed(_weighted(windows, block_bytes, memory_bytes, weights))
    if len(windows) == 1:
        return Shares.fixed([memory_bytes // block_bytes[0]])
    blocks = _needed(windows, block_bytes, memory_bytes, block_size, expected_tokens, longest_tokens)
    if not movable:
        return Shares.fixed(blocks)
    least = sum(block_bytes)
    return Shares(blocks, tuple((memory_bytes - least) // size + 1 for size in block_bytes), memory_bytes)


def _weighted(
    windows: Sequence[int | None], block_bytes: Sequence[int], memory_bytes: int, weights: Sequence[float]
) -> list[int]:
    if len(weights) != len(windows):
        groups = ", ".join("full attention" if window is None else f"window {window}" for window in windows)
        raise ModelError(
            f"KVKEEP_EXECUTOR_POOL_SHARES: has {len(weights)} shares, and the model has {len(windows)} layer groups: "
            f"{groups}"
        )
    blocks = [
        int(memory_bytes * weight / sum(weights)) // size for weight, size in zip(weights, block_bytes, strict=True)
    ]
    for number, (count, size) in enumerate(zip(blocks, block_bytes, strict=True)):
        if not count:
            raise ModelError(
                f"KVKEEP_EXECUTOR_POOL_SHARES: gives layer group {number} less than a block of {size} bytes; "
                f"all groups together have {memory_bytes} bytes"
            )
    return blocks


def _needed(
    windows: Sequence[int | None],
    block_bytes: Sequence[int],
    memory_bytes: int,
    block_size: int,
    expected_tokens: int,
    longest_tokens: int,
) -> tuple[int, ...]:
    """Returns blocks per group: enough for one sequence at its admission, the rest for further, decoding sequences.

    An admission allocates a whole prompt's blocks in every group. A group with a window releases most of them once the
    prompt is computed.
    """
    whole = -(-expected_tokens // block_size)
    least = min(-(-longest_tokens // block_size), memory_bytes // sum(block_bytes))
    kept = [
        whole if window is None else min(whole, -(-(window - 1 + AHEAD_TOKENS) // block_size) + 1) for window in windows
    ]

    def blocks(full: int) -> tuple[int, ...]:
        """Returns the blocks of each group if full attention has `full` blocks."""
        others = max(0, full - whole)
        return tuple(max(least, min(full, whole) + others * each // whole) for each in kept)

    def total(full: int) -> int:
        return sum(count * size for count, size in zip(blocks(full), block_bytes, strict=True))

    # This bound also suffices if all groups have windows: such groups get only a part of `full` blocks.
    most = whole * (memory_bytes // min(block_bytes) + 1)
    return blocks(bisect_right(range(most), memory_bytes, key=total) - 1)
