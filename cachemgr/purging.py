"""Dropping cached blocks by filter."""

from cachemgr.api import BlockFilter, Purged, RemovalCause
from cachemgr.block import Block
from cachemgr.pool import Pool


def purge(pools: list[Pool], selected: BlockFilter, *, validate_only: bool) -> Purged:
    """Drops matching blocks that nobody uses, with all that stands on them; or only counts them."""
    purged = used = 0
    for pool in pools:
        doomed: dict[Block, None] = {}
        for block in pool.index.values():
            if not _matches(block, selected):
                continue
            if block.refs:
                used += 1
            elif block not in doomed:
                if pool.window is None:
                    doomed.update(dict.fromkeys(pool.descendants(block)))
                doomed[block] = None
        purged += len(doomed)
        if not validate_only:
            # Deepest first: a block stands on shallower ones only.
            for block in sorted(doomed, key=lambda block: -block.depth):
                pool.discard(block, RemovalCause.PURGED)
    return Purged(purged, used)


def _matches(block: Block, selected: BlockFilter) -> bool:
    if selected.salt is not None and (block.domain is None or block.domain.salt != selected.salt):
        return False
    return selected.max_priority is None or block.priority <= selected.max_priority
