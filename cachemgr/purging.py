"""Selecting cached blocks by filter, and dropping them."""

from cachemgr.admin_api import BlockFilter, Purged
from cachemgr.api import RemovalCause
from cachemgr.block import Block
from cachemgr.errors import BlocksInUseError
from cachemgr.pool import Pool
from cachemgr.records import BlockRecord


def matches(pool: Pool, block: Block, selected: BlockFilter) -> bool:
    """Whether a filter means a block, its prefix aside."""
    domain = block.domain
    if domain is None:
        wanted = (selected.salt, selected.adapter_id, selected.session_id, selected.tenant_id)
        if any(one is not None for one in wanted):
            return False
    elif not (
        selected.salt in (None, domain.salt)
        and selected.adapter_id in (None, domain.adapter_id)
        and selected.session_id in (None, domain.session_id)
        and selected.tenant_id in (None, domain.tenant_id)
    ):
        return False
    if selected.tier is not None and pool.tier_of(block).kind is not selected.tier:
        return False
    return selected.max_priority is None or block.priority <= selected.max_priority


def is_remembered(selected: BlockFilter, record: BlockRecord) -> bool:
    """Whether a filter may mean a block that the store remembers: its tier and its priority are not known yet."""
    return (
        selected.salt in (None, record.salt)
        and selected.adapter_id in (None, record.adapter_id)
        and selected.session_id in (None, record.session_id)
        and selected.tenant_id in (None, record.tenant_id)
    )


def purge(
    pools: list[tuple[Pool, set[Block] | None]], selected: BlockFilter, *, validate_only: bool, skip_used: bool
) -> Purged:
    """Drops matching blocks that nobody uses, with all that stands on them; or only counts them.

    Pools come with the only blocks that are meant, None for all. Raises BlocksInUseError when some are in use and
    need not be skipped.
    """
    found = [(pool, *_select(pool, among, selected)) for pool, among in pools]
    for full, gone, _ in found:
        for pool, doomed, _ in found:
            if full.window is None and pool.window is not None and pool.executor_id == full.executor_id:
                doomed.update(_useless(pool, gone))
    purged = sum(len(doomed) for _, doomed, _ in found)
    used = sum(used for _, _, used in found)
    if used and not skip_used and not validate_only:
        raise BlocksInUseError(f"{used} of the blocks are in use", metadata={"used_blocks": str(used)})
    if not validate_only:
        for pool, doomed, _ in found:
            # Deepest first: a block stands on shallower ones only.
            for block in sorted(doomed, key=lambda block: -block.depth):
                # With a block of full attention those of windows may have gone already.
                if block.parent is not None:
                    pool.discard(block, RemovalCause.PURGED)
    return Purged(purged, used)


def _useless(pool: Pool, gone: dict[Block, None]) -> dict[Block, None]:
    """What a window has of blocks that full attention loses: it goes with them."""
    found = (pool.index.get(block.key) for block in gone)
    return {block: None for block in found if block is not None and not block.refs}


def _select(pool: Pool, among: set[Block] | None, selected: BlockFilter) -> tuple[dict[Block, None], int]:
    doomed: dict[Block, None] = {}
    used = 0
    for block in pool.index.values():
        if block in doomed or (among is not None and block not in among) or not matches(pool, block, selected):
            continue
        if block.refs:
            used += 1
            continue
        behind = list(pool.descendants(block)) if pool.window is None else []
        # What is copied to or from a lower tier is in use, and nothing that it stands on goes without it.
        if any(other.refs for other in behind):
            used += 1
            continue
        doomed.update(dict.fromkeys(behind))
        doomed[block] = None
    return doomed, used
