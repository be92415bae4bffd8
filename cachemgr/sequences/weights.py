"""Eviction order after an executor's weights have changed: no new prompt matches blocks of the earlier weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.retention.leases import LeaseBook, leases_of
from cachemgr.retention.priority import OTHER_WEIGHTS, WEIGHTS
from cachemgr.slices import Slices, write_batches
from cachemgr.types import RemovalCause

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor


def reorder_blocks(executor: Executor, leases: LeaseBook) -> Slices[int]:
    """Has blocks of outdated weights evicted first, and restores the normal order for blocks of the current weights.

    Returns the number of blocks of outdated weights.
    """
    others = 0
    for pool in executor.pools:
        keys = list(pool.tree.by_key)
        yield
        for part in write_batches(keys):
            for key in part:
                block = pool.tree.by_key.get(key)
                if block is not None:
                    others += _reorder(pool, block, executor.spec.weight_version, leases)
            yield
    return others


def _reorder(pool: BlockPool, block: Block, weight_version: str, leases: LeaseBook) -> bool:
    assert block.scope is not None
    holders = [lease.request.holder for lease in leases_of(block)]
    if block.scope.weight_version == weight_version:
        if WEIGHTS in holders:
            leases.revoke(pool, block, WEIGHTS, RemovalCause.WEIGHTS_UPDATED)
        return False
    for holder in holders:
        if holder != WEIGHTS:
            leases.revoke(pool, block, holder, RemovalCause.WEIGHTS_UPDATED)
    if WEIGHTS not in holders:
        leases.grant(pool, block, OTHER_WEIGHTS)
    return True
