"""Estimates of the blocks that a sequence needs."""

from __future__ import annotations

from cachemgr.blocks.block import Block
from cachemgr.sequences.sequence import Sequence, first_needed
from cachemgr.sequences.token_eviction_state import blocks_for
from cachemgr.types import BlockEstimate


def before_admission(sequence: Sequence, matched: list[list[Block | None]], max_new_tokens: int) -> list[BlockEstimate]:
    """Estimates the blocks of a sequence before its admission; `matched` is its prefix hit by group.

    Its first step allocates all its blocks. Device blocks in use cost nothing; each cached block without a reference
    costs a free block. A sequence that evicts tokens has both of its tables at once.
    """
    size, tokens = sequence.block_size, len(sequence.tokens)
    found = []
    for group, table in enumerate(sequence.tables):
        blocks = matched[group]
        held = sum(block is not None and block.refs > 0 and table.pool.is_on_device(block) for block in blocks)
        absent = sum(block is None for block in blocks)
        step = blocks_for(sequence.slots_for(tokens), size) - held - absent
        last = sequence.peak_blocks(tokens + max_new_tokens) - held - absent
        if table.pool.window is not None:
            # It has all blocks of its tokens at once; later blocks replace blocks that leave the window.
            last = min(last, max(step, _blocks_in_window(table.pool.window, tokens, tokens + max_new_tokens, size)))
        found.append(BlockEstimate(table.pool.spec.group, len(blocks) - absent, step, last))
    return found


def _blocks_in_window(window: int, start: int, end: int, size: int) -> int:
    """The maximum number of blocks held at once while a sequence grows from `start` to `end` tokens."""
    return min(blocks_for(end, size) - first_needed(start, window, size), blocks_for(window, size) + 1)
