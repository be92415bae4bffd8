"""Registrations of executors: their checks, new pools, and shares of device memory."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import compress

from cachemgr.blocks.block_pool import BlockPool, PoolListener
from cachemgr.blocks.block_record import IndexJournal
from cachemgr.blocks.events import EventLog
from cachemgr.retention.leases import LeaseBook
from cachemgr.types import ExecutorSpec, ManagerConfig, PoolShare, PoolSpec, TierKind
from cachemgr.validation import check_id, check_weight_version
from protos.errors import InvalidField

# Each slot takes memory of this process from the start.
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
    check_weight_version(spec.weight_version)
    if not spec.pools:
        raise InvalidField("pools", "must not be empty")
    if spec.last_write_steps and len(spec.last_write_steps) != len(spec.pools):
        raise InvalidField("pools", "must all have last_write_steps, or none")
    _check_pools(spec)
    if spec.memory_bytes is not None:
        need = sum(pool.share_blocks * pool.block_bytes for pool in spec.pools)
        if spec.memory_bytes < need:
            raise InvalidField("memory_bytes", f"must be at least {need}, what the shares of the pools take")


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
        if spec.memory_bytes is not None and not 1 <= pool.share_blocks <= pool.num_blocks:
            raise InvalidField(f"{path}.share_blocks", f"must be from 1 to {pool.num_blocks}, the slots of the pool")
        if spec.memory_bytes is None and pool.share_blocks:
            raise InvalidField(f"{path}.share_blocks", "must be 0 where pools share no memory_bytes")
        _check_contents(spec, number, path)
    total = 0
    for number, pool in enumerate(spec.pools):
        for field in ("num_blocks", "host_blocks", "disk_blocks"):
            total += getattr(pool, field)
            if total > MAX_SLOTS:
                raise InvalidField(f"pools[{number}].{field}", f"must leave at most {MAX_SLOTS} slots in total")


def _check_contents(spec: ExecutorSpec, group: int, path: str) -> None:
    """Checks that steps and generations are given for every slot, or for none."""
    pool = spec.pools[group]
    steps = spec.last_write_steps[group] if spec.last_write_steps else ()
    if steps and len(steps) != pool.num_blocks:
        raise InvalidField(f"{path}.last_write_steps", "must have one entry per block")
    for tier, slots in ((TierKind.HOST, pool.host_blocks), (TierKind.DISK, pool.disk_blocks)):
        if len(spec.generations(tier, group)) not in (0, slots):
            field = f"{path}.{tier.name.lower()}_generations"
            raise InvalidField(field, f"must have one entry for each of the {slots} slots, or none")


def new_pools(
    config: ManagerConfig,
    events: EventLog,
    leases: LeaseBook,
    journal: IndexJournal,
    spec: ExecutorSpec,
    listener: PoolListener,
) -> list[BlockPool]:
    windowed: list[BlockPool] = []

    def new_pool(pool: PoolSpec) -> BlockPool:
        return BlockPool(
            spec.executor_id,
            pool,
            spec.block_size,
            events,
            leases,
            journal,
            listener,
            windowed=windowed if pool.attention_window is None else (),
            offload_min_priority=config.offload_min_priority,
            write_through=config.write_through,
            lost_blocks=config.lost_blocks,
        )

    pools = [new_pool(pool) for pool in spec.pools]
    windowed += [pool for pool in pools if pool.window is not None]
    return pools


def lower_tiers_survive(before: ExecutorSpec, spec: ExecutorSpec) -> bool:
    """Whether a restarted executor may have earlier blocks in its lower tiers; sizes may change."""
    reported = any(len(slots) for tier in (spec.host_generations, spec.disk_generations) for slots in tier)
    same = (before.model_fingerprint, before.block_size) == (spec.model_fingerprint, spec.block_size)
    layouts = [
        [replace(pool, num_blocks=0, share_blocks=0, host_blocks=0, disk_blocks=0) for pool in one.pools]
        for one in (before, spec)
    ]
    return reported and same and layouts[0] == layouts[1]


def divide_device_memory(pools: list[BlockPool], spec: ExecutorSpec, shares: Mapping[str, PoolShare]) -> None:
    """Gives every pool its initial share of the common memory, or the share that an operator has set.

    If the operators' shares exceed the memory together, every pool gets its initial share.
    """
    memory = spec.memory_bytes
    given = {pool: shares[pool.pool_id] for pool in pools if fits(pool, shares.get(pool.pool_id))}
    totals = {pool: pool.spec.share_blocks or pool.spec.num_blocks for pool in pools}
    wanted = totals | {pool: share.total_blocks for pool, share in given.items()}
    if memory is not None and sum(total * pool.spec.block_bytes for pool, total in wanted.items()) > memory:
        given, wanted = {}, totals
    for pool, total in wanted.items():
        if total != pool.device.total:
            steps = spec.last_write_steps[pool.spec.group] if spec.last_write_steps else ()
            pool.resize(total, compress(range(1, len(steps) + 1), steps))
    for pool, share in given.items():
        pool.share_number = share.number


def fits(pool: BlockPool, share: PoolShare | None) -> bool:
    """Whether a share is for a pool of this size."""
    return share is not None and share.num_blocks == pool.spec.num_blocks and 0 < share.total_blocks <= share.num_blocks
