"""Selecting cached blocks by filter, and dropping them."""

from itertools import chain

from cachemgr.admin_api import BlockFilter, Purged
from cachemgr.api import RemovalCause
from cachemgr.block import Block, Node
from cachemgr.errors import BlocksInUseError
from cachemgr.pool import Pool
from cachemgr.records import BlockRecord
from cachemgr.registry import Executor
from cachemgr.steps import Doomed, Steps, changes, drained, looks, with_descendants


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
    pools: list[tuple[Executor, Pool, set[Block] | None]],
    selected: BlockFilter,
    *,
    validate_only: bool,
    skip_used: bool,
) -> Steps[Purged]:
    """Drops matching blocks that nobody uses, with all that stands on them; or only counts them.

    Pools come with the only blocks that are meant, None for all. What has come to be used since they were found, or
    has something new behind it, stays. Raises BlocksInUseError, with nothing changed, when some are in use and need not
    be skipped.
    """
    plans, used = yield from _plan(pools, selected)
    if validate_only or (used and not skip_used):
        purged = 0
        for plan in plans:
            for blocks in looks(plan.blocks()):
                purged += len(blocks)
                yield
        if used and not validate_only:
            raise BlocksInUseError(f"{used} of the blocks are in use", metadata={"used_blocks": str(used)})
        return Purged(purged, used)
    purged = 0
    for plan in plans:
        for keyed in changes(plan.deepest_first()):
            for key, holders in keyed:
                found = [(pool, pool.index[key]) for pool in holders if key in pool.index]
                free = [(pool, block) for pool, block in found if _is_free(pool, block)]
                purged += len(free)
                used += len(found) - len(free)
                for pool, block in free:
                    # With a block of full attention those of windows may have gone already.
                    if block.parent is not None:
                        pool.discard(block, RemovalCause.PURGED)
            yield
    return Purged(purged, used)


def _plan(
    pools: list[tuple[Executor, Pool, set[Block] | None]], selected: BlockFilter
) -> Steps[tuple[list[Doomed], int]]:
    """What goes of each executor, and how many blocks are meant and stay."""
    indexed = [(executor, pool, list(pool.index), among) for executor, pool, among in pools]
    plans: dict[Executor, Doomed] = {}
    gone: dict[Executor, list[dict[Block, None]]] = {}
    used = 0
    for executor, pool, keys, among in indexed:
        doomed, stay = yield from _select(pool, keys, among, selected)
        used += stay
        if pool.window is None:
            gone.setdefault(executor, []).append(doomed)
        plan = plans.setdefault(executor, Doomed())
        for part in changes(doomed):
            for block in part:
                if block.parent is not None:
                    plan.add(pool, block)
            yield
    for executor, pool, _, _ in indexed:
        if pool.window is not None:
            yield from _add_useless(plans[executor], pool, gone.get(executor, []))
    return list(plans.values()), used


def _is_free(pool: Pool, block: Block) -> bool:
    return not block.refs and (pool.window is not None or block.children is None)


def _add_useless(plan: Doomed, pool: Pool, gone: list[dict[Block, None]]) -> Steps[None]:
    """What a window has of blocks that full attention loses: it goes with them."""
    for part in looks(chain.from_iterable(gone)):
        for block in part:
            useless = pool.index.get(block.key)
            if useless is not None and not useless.refs:
                plan.add(pool, useless)
        yield


def _select(
    pool: Pool, keys: list[bytes], among: set[Block] | None, selected: BlockFilter
) -> Steps[tuple[dict[Block, None], int]]:
    """Blocks that go, with all that stands on them, and how many are meant and stay. It uses the keys up."""
    meant: list[Block] = []
    # Blocks in use, and with full attention what they stand on. What is copied to or from a lower tier is in use, too.
    stay: set[Block] = set()
    for part in drained(keys):
        for key in part:
            block = pool.index.get(key)
            if block is None:
                continue
            if block.refs:
                node: Node | None = block
                while isinstance(node, Block) and node not in stay:
                    stay.add(node)
                    node = node.parent if pool.window is None else None
            if (among is None or block in among) and matches(pool, block, selected):
                meant.append(block)
        yield
    count, going = len(meant), []
    for some in drained(meant):
        going += [block for block in some if block not in stay]
        yield
    used = count - len(going)
    if pool.window is None:
        return (yield from with_descendants(going)), used
    found: dict[Block, None] = {}
    for some in looks(going):
        found.update(dict.fromkeys(some))
        yield
    return found, used
