"""Checking an executor's announcement, and putting back what a store remembers of it."""

from collections import deque
from collections.abc import Iterable
from functools import partial

from cachemgr.api import ExecutorSpec
from cachemgr.block import Block
from cachemgr.errors import InvalidField
from cachemgr.journal import IndexJournal
from cachemgr.keys import TOKEN_BYTES, child_key
from cachemgr.leases import LeaseBook
from cachemgr.pool import Pool
from cachemgr.records import BlockRecord
from cachemgr.registry import Executor
from cachemgr.retention import MAX_PRIORITY, NO_PRIORITY, Wish
from cachemgr.validation import check_id

# Each slot costs memory of this process from the start.
MAX_SLOTS = 1 << 24
# Positions and capacities are 32-bit numbers in messages.
MAX_POOL_TOKENS = (1 << 32) - 1


def check_spec(spec: ExecutorSpec) -> None:
    """Raises InvalidField."""
    check_id("executor_id", spec.executor_id)
    if spec.executor_epoch < 1:
        raise InvalidField("executor_epoch", "must be at least 1")
    if not spec.model_fingerprint:
        raise InvalidField("model_fingerprint", "must not be empty")
    if spec.block_size < 2 or spec.block_size & (spec.block_size - 1):
        raise InvalidField("block_size", "must be a power of two greater than 1")
    if not spec.pools:
        raise InvalidField("pools", "must not be empty")
    if spec.last_write_steps and len(spec.last_write_steps) != len(spec.pools):
        raise InvalidField("pools", "must all tell their last_write_steps, or none")
    if spec.memory_bytes is not None and spec.memory_bytes < sum(pool.block_bytes for pool in spec.pools):
        raise InvalidField("memory_bytes", "must hold a block of each pool")
    _check_pools(spec)


def _check_pools(spec: ExecutorSpec) -> None:
    for number, pool in enumerate(spec.pools):
        path = f"pools[{number}]"
        if pool.group != number:
            raise InvalidField(f"{path}.group", f"must be {number}: groups are numbered in order")
        if pool.num_blocks < 1:
            raise InvalidField(f"{path}.num_blocks", "must be at least 1")
        if pool.num_blocks * spec.block_size > MAX_POOL_TOKENS:
            raise InvalidField(f"{path}.num_blocks", f"must hold at most {MAX_POOL_TOKENS} tokens")
        if pool.attention_window is not None and pool.attention_window < 1:
            raise InvalidField(f"{path}.attention_window", "must be at least 1; leave it out for full attention")
        if spec.memory_bytes is not None and not pool.block_bytes:
            raise InvalidField(f"{path}.block_bytes", "must be known where pools share memory_bytes")
        steps = spec.last_write_steps[number] if spec.last_write_steps else ()
        if steps and len(steps) != pool.num_blocks:
            raise InvalidField(f"{path}.last_write_steps", "must have one entry per block")
    slots = 0
    for number, pool in enumerate(spec.pools):
        for field in ("num_blocks", "host_blocks", "disk_blocks"):
            slots += getattr(pool, field)
            if slots > MAX_SLOTS:
                raise InvalidField(f"pools[{number}].{field}", f"must leave at most {MAX_SLOTS} slots in all together")


def _share_memory(executor: Executor) -> None:
    """Gives every pool its first share of the memory that they have together.

    A sequence takes equally many blocks in every group, as its prompt is computed before a window gives any back: in
    proportion to the bytes that it needs is the same number of blocks.
    """
    memory = executor.spec.memory_bytes
    if memory is None:
        return
    total = max(1, memory // sum(pool.spec.block_bytes for pool in executor.pools))
    for pool in executor.pools:
        if total < pool.device.total:
            pool.resize(total)


def restore(executor: Executor, remembered: Iterable[BlockRecord], journal: IndexJournal, leases: LeaseBook) -> int:
    """Puts remembered blocks back that the device still holds and has memory for; the journal hears of all others."""
    used: list[set[int]] = [set() for _ in executor.pools]
    for record in sorted(remembered, key=lambda block: block.depth):
        if _holds(executor, record, used):
            used[record.group].add(record.slot)
            _adopt(executor, record, leases, journal)
        elif record.group >= len(used) or record.slot not in used[record.group]:
            journal.removed(executor.executor_id, record.group, record.slot)
    for pool in executor.pools:
        pool.device.empty = deque(slot for slot in range(1, pool.device.size + 1) if pool.blocks[slot] is None)
    _share_memory(executor)
    return sum(len(pool.index) for pool in executor.pools)


def _holds(executor: Executor, record: BlockRecord, used: list[set[int]]) -> bool:
    if record.group >= len(executor.pools):
        return False
    pool = executor.pools[record.group]
    steps = executor.spec.last_write_steps[record.group] if executor.spec.last_write_steps else ()
    if not 1 <= record.slot <= len(steps) or record.slot in used[record.group]:
        return False
    if steps[record.slot - 1] > record.stored_step:
        return False
    if any(not NO_PRIORITY <= lease.priority <= MAX_PRIORITY for lease in record.leases):
        return False
    if not 1 <= len(record.tokens) // TOKEN_BYTES <= pool.block_size or record.key in pool.index:
        return False
    return _fits(executor, pool, record)


def _fits(executor: Executor, pool: Pool, record: BlockRecord) -> bool:
    """Whether the key is that of the tokens behind the parent, and the parent is there."""
    root = executor.domain(record.salt, record.adapter_id).key
    if (record.parent_key is None) != (record.depth == 0):
        return False
    parent_key = root if record.parent_key is None else record.parent_key
    if record.parent_key is not None:
        parent = pool.index.get(record.parent_key)
        if parent is None and pool.window is None:
            return False
        full = pool.block_size * TOKEN_BYTES
        if parent is not None and (parent.depth != record.depth - 1 or len(parent.tokens) != full):
            return False
    return child_key(parent_key, record.tokens, record.extra) == record.key


def _adopt(executor: Executor, record: BlockRecord, leases: LeaseBook, journal: IndexJournal) -> None:
    pool = executor.pools[record.group]
    domain = executor.domain(record.salt, record.adapter_id, record.tenant_id, record.session_id, record.extra)
    block = Block(record.slot)
    # The newest comes first in a record, and in a list that grows at its beginning.
    for lease in reversed(record.leases):
        leases.restore(
            pool, block, Wish(lease.holder, lease.priority, lease.duration, lease.offload_min_priority), lease.remaining
        )
    parent_key = domain.key if record.parent_key is None else record.parent_key
    pool.adopt(block, record.key, parent_key, record.tokens, record.depth, domain, record.stored_step)
    if any(lease.duration is not None and lease.remaining is None for lease in record.leases):
        # Its user is gone, and its clock runs from now on.
        journal.stored(executor.executor_id, pool.spec.group, block.slot, partial(pool.current_record, block))
