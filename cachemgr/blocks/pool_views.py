"""What is read of a pool. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from cachemgr.blocks.block import Block
from cachemgr.blocks.block_record import USED_LAST, BackupRecord, BlockRecord, LeaseRecord
from cachemgr.blocks.eviction_history import UseTimes
from cachemgr.blocks.tier import Tier
from cachemgr.blocks.write_through import Backups
from cachemgr.retention.leases import LeaseBook, leases_of
from cachemgr.telemetry.counters import TokenMeter
from cachemgr.types import BlockView, EventKind, LeaseView, PoolSpec, PoolView, TierUsage

_DEPTH = attrgetter("depth")
_new = tuple.__new__


class PoolViews:
    """The reading half of a pool; the other half owns the fields."""

    pool_id: str
    executor_id: str
    spec: PoolSpec
    block_size: int
    device: Tier
    tiers: tuple[Tier, Tier, Tier]
    blocks: list[Block | None]
    index: dict[bytes, Block]
    backups: Backups
    tokens: TokenMeter
    share_number: int
    use_times: UseTimes
    honoured_leases: int
    broken_leases: int
    _leases: LeaseBook

    def tier_of(self, block: Block) -> Tier:
        """The tier that a block lies in."""
        device, host, disk = self.tiers
        if block.slot <= device.size:
            return device
        return host if block.slot <= disk.offset else disk

    def tier_at(self, place: int) -> Tier:
        """The tier of a place."""
        return next(tier for tier in self.tiers if place <= tier.offset + tier.size)

    def is_on_device(self, block: Block) -> bool:
        """Whether a step can use it where it is."""
        return block.slot <= self.device.size

    def view(self, block: Block) -> BlockView:
        """The block as seen from outside."""
        parent, depth, device = block.parent, block.depth, self.device
        tier = device if block.slot <= device.size else self.tier_of(block)
        key = parent_key = tokens = b""
        if parent is not None:
            key, tokens = block.key, block.tokens
            if depth:
                parent_key = parent.key
        # Half the time of BlockView(...), for each block that comes or goes.
        return _new(
            BlockView,
            (
                self.pool_id,
                block.slot - tier.offset,
                key,
                parent_key,
                tokens,
                block.refs,
                block.priority,
                depth,
                tier.kind,
                block.domain,
                0,
                None,
            ),
        )

    def listed(self, block: Block) -> BlockView:
        """As `view`, with how often and when it was used."""
        used = block.refs or not block.recency
        idle = None if used else max(0.0, self._leases.now - self.use_times.at(block.recency))
        return self.view(block)._replace(hits=block.hits, idle=idle)

    def current_record(self, block: Block) -> BlockRecord | None:
        """A block as the store keeps it; None when it has left the index."""
        return None if block.parent is None else self.record(block)

    def record(self, block: Block) -> BlockRecord:
        """An indexed block as the store keeps it."""
        assert block.parent is not None
        domain, tier = block.domain, self.tier_of(block)
        assert domain is not None
        return BlockRecord(
            group=self.spec.group,
            tier=tier.kind,
            slot=block.slot - tier.offset,
            generation=tier.generation(block.slot),
            backup=self._backup_record(block) if self.backups.places else None,
            last_use=USED_LAST if tier is self.device else block.recency,
            key=block.key,
            parent_key=block.parent.key if block.depth else None,
            depth=block.depth,
            tokens=block.tokens,
            salt=domain.salt,
            adapter_id=domain.adapter_id,
            tenant_id=domain.tenant_id,
            session_id=domain.session_id,
            extra=domain.extra,
            stored_step=block.stored_step,
            leases=() if block.lease is None else self._lease_records(block),
        )

    def _backup_record(self, block: Block) -> BackupRecord | None:
        place, tier = self.backups.places.get(block), self.backups.tier
        if place is None or tier is None:
            return None
        return BackupRecord(tier.kind, place - tier.offset, tier.generation(place))

    def _lease_records(self, block: Block) -> tuple[LeaseRecord, ...]:
        return tuple(
            LeaseRecord(
                lease.wish.holder,
                lease.wish.priority,
                lease.wish.duration,
                None if lease.deadline is None else lease.remaining(self._leases.now),
                lease.wish.offload_min_priority,
            )
            for lease in leases_of(block)
        )

    def records(self) -> Iterator[BlockRecord]:
        """Every indexed block by place, as it is when it is asked for: blocks may change between two of them."""
        for block in self.blocks:
            if block is not None and block.parent is not None:
                yield self.record(block)

    def state(self) -> Iterator[tuple[EventKind, BlockView, LeaseView | None]]:
        """What has to happen to a new pool to become this one; parents before children."""
        yield EventKind.CREATED, BlockView.of_pool(self.pool_id), None
        for block in sorted(self.index.values(), key=_DEPTH):
            view = self.view(block)
            yield EventKind.STORED, view, None
            for lease in leases_of(block):
                yield EventKind.LEASE_GRANTED, view, self._leases.view(lease)

    def pool_view(self) -> PoolView:
        """The pool with its counters."""
        device = self.device
        return PoolView(
            pool_id=self.pool_id,
            executor_id=self.executor_id,
            spec=self.spec,
            block_size=self.block_size,
            total_blocks=device.total,
            free_blocks=device.free,
            used_blocks=device.used,
            cached_blocks=device.cached,
            evicted_blocks=device.counters.evicted,
            queried_tokens=self.tokens.total.queried,
            hit_tokens=self.tokens.total.hit,
            lower_tiers=tuple(
                TierUsage(tier.kind, tier.total, tier.free, tier.used, tier.cached)
                for tier in self.tiers[1:]
                if tier.size
            ),
            etag=str(self.share_number),
        )
