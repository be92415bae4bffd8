"""How many blocks a sequence takes, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.sequences.sequence import blocks_for, first_needed
from cachemgr.types import BlockEstimate

if TYPE_CHECKING:
    from cachemgr.sequences.prefix_match import Match
    from cachemgr.sequences.sequence import Sequence


def before_admission(sequence: Sequence, match: Match, max_new_tokens: int) -> list[BlockEstimate]:
    """For a sequence that is not admitted: its first step takes all blocks of its tokens.

    What others hold costs nothing; what is cached and free is taken from those that are free. Who evicts tokens has all
    that it had and all that it moves to at once.
    """
    size, tokens = sequence.block_size, len(sequence.tokens)
    found = []
    for group, table in enumerate(sequence.tables):
        blocks = match.blocks[group]
        held = sum(block is not None and block.refs > 0 and table.pool.is_on_device(block) for block in blocks)
        absent = sum(block is None for block in blocks)
        step = blocks_for(sequence.slots_for(tokens), size) - held - absent
        last = sequence.peak_blocks(tokens + max_new_tokens) - held - absent
        if table.pool.window is not None:
            # It has all blocks of its tokens at once; behind them those that leave the window pay for the next.
            last = min(last, max(step, _blocks_in_window(table.pool.window, tokens, tokens + max_new_tokens, size)))
        found.append(BlockEstimate(table.pool.spec.group, len(blocks) - absent, step, last))
    return found


def while_running(sequence: Sequence, step_tokens: int, max_new_tokens: int) -> list[BlockEstimate]:
    """For a live sequence: what its next step and all its steps take beyond what it has."""
    size = sequence.block_size
    known = len(sequence.tokens)
    found = []
    for table in sequence.tables:
        have = len(table.blocks) + len(sequence.private)
        step = max(0, sequence.peak_blocks(sequence.computed + step_tokens) - have)
        window = table.pool.window
        last = max(0, sequence.peak_blocks(known + max_new_tokens) - have)
        if window is not None:
            # Every block that it takes from now on pays for itself with one that leaves the window, up to these.
            present = sum(block is not None for block in table.blocks)
            need = _blocks_in_window(window, known, known + max_new_tokens, size)
            last = max(0, min(last, max(step, need - present)))
        found.append(BlockEstimate(table.pool.spec.group, 0, step, last))
    return found


def _blocks_in_window(window: int, start: int, end: int, size: int) -> int:
    """The most blocks that a sequence holds at once while it grows from one length to another."""
    return min(blocks_for(end, size) - first_needed(start, window, size), blocks_for(window, size) + 1)
