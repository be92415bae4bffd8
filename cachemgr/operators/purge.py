"""Selecting cached blocks by a filter, and purging them."""

from collections.abc import Callable, Collection
from functools import cache

from cachemgr.blocks.block import Block, CacheScope, Node
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.block_record import BlockRecord
from cachemgr.errors import BlocksInUseError
from cachemgr.operators.removal_plan import RemovalPlan
from cachemgr.retention.priority import NO_PRIORITY, priority_or_default
from cachemgr.sequences.clients import Executor
from cachemgr.sequences.prefix_match import keys_of
from cachemgr.slices import Slices, pop_batches, read_batches, write_batches
from cachemgr.types import BlockFilter, Purged, RemovalCause


def matches(pool: BlockPool, block: Block, selected: BlockFilter) -> bool:
    """Whether a filter matches a block; ignores the filter's pool and prefix."""
    if not _matches_scope(block.scope, selected):
        return False
    if selected.tier is not None and pool.tier_of(block).kind is not selected.tier:
        return False
    return selected.max_priority is None or block.priority <= selected.max_priority


def stored_filter(executor: Executor, groups: Collection[int], selected: BlockFilter) -> Callable[[BlockRecord], bool]:
    """Returns whether a filter matches a stored block of an executor. groups: layer groups that the filter selects."""
    prefix, spec = selected.prefix, executor.spec

    @cache
    def keys(weight_version: str) -> Collection[bytes]:
        return set() if prefix is None else set(keys_of(spec, prefix, weight_version))

    def matches_record(record: BlockRecord) -> bool:
        return (
            record.group in groups
            and _matches_scope(record, selected)
            and selected.tier in (None, record.tier)
            and (selected.max_priority is None or _priority(record) <= selected.max_priority)
            and (prefix is None or record.key in keys(record.weight_version))
        )

    return matches_record


def _matches_scope(scope: CacheScope | BlockRecord | None, selected: BlockFilter) -> bool:
    """Whether a filter matches the scope of a block; without a scope, whether the filter selects no scope."""
    if scope is None:
        wanted = (selected.salt, selected.adapter_id, selected.session_id, selected.tenant_id)
        return all(one is None for one in wanted)
    return (
        selected.salt in (None, scope.salt)
        and selected.adapter_id in (None, scope.adapter_id)
        and selected.session_id in (None, scope.session_id)
        and selected.tenant_id in (None, scope.tenant_id)
    )


def _priority(record: BlockRecord) -> int:
    return priority_or_default(max((lease.priority for lease in record.leases), default=NO_PRIORITY))


def purge(
    pools: list[tuple[Executor, BlockPool, set[Block] | None]],
    selected: BlockFilter,
    *,
    validate_only: bool,
    skip_used: bool,
) -> Slices[Purged]:
    """Drops matching blocks that are not in use, with their descendants; or only counts the blocks.

    Each pool comes with the only blocks to consider, None for all. Blocks that have since come into use or got a new
    child stay. If some blocks are in use and must not be skipped, raises BlocksInUseError and changes nothing.
    """
    plans, used = yield from _plan(pools, selected)
    if validate_only or (used and not skip_used):
        purged = 0
        for plan in plans:
            for blocks in read_batches(plan.blocks()):
                purged += len(blocks)
                yield
        if used and not validate_only:
            raise BlocksInUseError(f"{used} of the blocks are in use", metadata={"used_blocks": str(used)})
        return Purged(purged, used)
    purged = 0
    for plan in plans:
        for keyed in write_batches(plan.deepest_first()):
            for key, holders in keyed:
                found = [(pool, pool.tree.by_key[key]) for pool in holders if key in pool.tree.by_key]
                free = [(pool, block) for pool, block in found if _is_free(pool, block)]
                purged += len(free)
                used += len(found) - len(free)
                for pool, block in free:
                    # A window's block may have been removed with its full-attention block.
                    if block.parent is not None:
                        pool.discard(block, RemovalCause.PURGED)
            yield
    return Purged(purged, used)


def _plan(
    pools: list[tuple[Executor, BlockPool, set[Block] | None]], selected: BlockFilter
) -> Slices[tuple[list[RemovalPlan], int]]:
    """The blocks to remove from each executor, and how many matching blocks stay."""
    indexed = [(executor, pool, list(pool.tree.by_key), among) for executor, pool, among in pools]
    plans = {executor: RemovalPlan() for executor, _, _, _ in indexed}
    used = 0
    for executor, pool, keys, among in indexed:
        going, stay = yield from _select(pool, keys, among, selected)
        used += stay
        yield from plans[executor].add_all(pool, going)
    for executor, pool, _, _ in indexed:
        if pool.window is not None:
            yield from _add_useless(plans[executor], pool)
    return list(plans.values()), used


def _is_free(pool: BlockPool, block: Block) -> bool:
    return not block.refs and (pool.window is not None or block.children is None)


def _add_useless(plan: RemovalPlan, pool: BlockPool) -> Slices[None]:
    """Adds the windows' blocks whose keys full-attention groups lose."""
    for keys in read_batches(plan.of_full_attention()):
        for key in keys:
            useless = pool.tree.by_key.get(key)
            if useless is not None and not useless.refs:
                plan.add(pool, useless)
        yield


def _select(
    pool: BlockPool, keys: list[bytes], among: set[Block] | None, selected: BlockFilter
) -> Slices[tuple[list[Block], int]]:
    """Returns matching blocks without their descendants, and how many matching blocks stay. Consumes `keys`."""
    meant: list[Block] = []
    # Blocks in use, which include sources and targets of copies; with full attention, also their ancestors.
    stay: set[Block] = set()
    for part in pop_batches(keys):
        for key in part:
            block = pool.tree.by_key.get(key)
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
    count, going = len(meant), list[Block]()
    for some in pop_batches(meant):
        going += [block for block in some if block not in stay]
        yield
    return going, count - len(going)
