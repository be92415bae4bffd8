"""Executors with their pools, as they announce them, and schedulers with their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, cast
from weakref import WeakSet, WeakValueDictionary

from cachemgr.blocks.block_keys import CacheScope
from cachemgr.blocks.block_pool import BlockPool, PoolListener
from cachemgr.blocks.block_record import IndexJournal
from cachemgr.blocks.events import EventLog
from cachemgr.retention.leases import LeaseBook
from cachemgr.sequences.holds import Holds
from cachemgr.sequences.transfers import Copies, Purpose
from cachemgr.steps import Steps, looks
from cachemgr.types import (
    AccountKey,
    ExecutorSpec,
    GhostReport,
    ManagerConfig,
    PoolShare,
    PoolSpec,
    Restored,
    SyncAnswer,
    TierKind,
)
from cachemgr.validation import check_id
from protos.errors import InvalidField

if TYPE_CHECKING:
    from cachemgr.blocks.account import Account
    from cachemgr.blocks.block import Block, Writer
    from cachemgr.blocks.recovery import Recovery
    from cachemgr.blocks.write_through import CopyTicket
    from cachemgr.sequences.sequence import Sequence
    from cachemgr.sequences.transfers import Ticket


_SCOPE = attrgetter("scope")


def account_for(accounts: Mapping[AccountKey, Account], tenant_id: str | None, salt: str | None) -> Account | None:
    """The account that blocks count against, None for none: a quota of the tenant precedes that of the salt."""
    tenants = None if tenant_id is None else accounts.get(("tenant_id", tenant_id))
    return tenants or (None if salt is None else accounts.get(("salt", salt)))


class AccountScopes:
    """The cache scopes of one tenant or salt."""

    __slots__ = ("__weakref__", "scopes")

    def __init__(self) -> None:
        self.scopes: WeakSet[CacheScope] = WeakSet()


class GhostCaches(Protocol):
    """Simulates caches of other sizes and eviction orders from the sequences of one pool."""

    pool: BlockPool

    def admitted(self, sequence: Sequence, now: float, *, is_read: bool, source: bytes) -> None:
        """A sequence was admitted; `is_read` if it has looked for cached blocks.

        `source` is the key of the block whose beginning it copies or takes over, empty for none.
        """

    def stored(self, sequence: Sequence) -> int:
        """Leading blocks of a sequence that hold the tokens of their keys."""

    def released(self, sequence: Sequence, stored: int) -> None:
        """A sequence has released its blocks, of which so many were stored."""

    def report(self, since: float | None) -> GhostReport:
        """The hits of the caches since about a time, or since the beginning."""


class Executor:
    """One epoch of an executor."""

    def __init__(
        self,
        spec: ExecutorSpec,
        new_pools: Callable[[ExecutorSpec, PoolListener], list[BlockPool]],
        deadline: float,
        next_number: Callable[[], int],
        holds: Holds,
        accounts: Mapping[AccountKey, Account],
        before: Executor | None = None,
    ) -> None:
        """`before` is the last epoch, whose pools it takes over."""
        self.spec = spec
        self.executor_id = spec.executor_id
        self.epoch = spec.executor_epoch
        self.block_size = spec.block_size
        self.deadline = deadline
        self.sequences: dict[int, Sequence] = {}
        self.tickets: dict[int, Ticket] = {}
        self.copies = Copies(self.tickets, next_number)
        # Lists to which each block is added that takes the place of another in the index.
        self._superseding: list[list[tuple[BlockPool, Block]]] = []
        self.ghosts: GhostCaches | None = None
        # Whether anything can find partly filled blocks.
        self.stores_partial = True
        # Set while what the store remembers is still to come.
        self.recovery: Recovery | None = None
        self.holds = holds
        self._accounts = accounts
        self._scopes: WeakValueDictionary[tuple[object, ...], CacheScope]
        self._scopes = WeakValueDictionary() if before is None else before._scopes
        # By what a quota may be of, as long as there are scopes of that.
        self._named: WeakValueDictionary[tuple[str, str | None], AccountScopes]
        self._named = WeakValueDictionary() if before is None else before._named
        self.pools: list[BlockPool] = new_pools(spec, self) if before is None else before.pools

    # What its pools tell it. The writers of their blocks are sequences.

    def offloading(self, pool: BlockPool, block: Block, occupant: Block, writer: Writer | None) -> Ticket:
        """Opens the copy of a block that is offloaded."""
        return self.copies.offload(pool, block, occupant, cast("Sequence | None", writer))

    def offload_recalled(self, ticket: CopyTicket, writer: Writer) -> None:
        """Cancels an offload that was not sent."""
        self.copies.recall(ticket.number, cast("Sequence", writer))

    def zeroing(self, pool: BlockPool, block: Block) -> None:
        """Opens the copy that overwrites a slot before it is empty."""
        self.copies.overwrite(pool, Purpose.ZERO, block)

    def withheld(self, pool: BlockPool, block: Block) -> None:
        """Opens the copy that overwrites a slot before other pools may have its memory."""
        self.copies.overwrite(pool, Purpose.CLEAR, block)

    def superseded(self, pool: BlockPool, old: Block, block: Block) -> None:
        """A device block replaces an equal one in the index, and gets its children."""
        for superseding in self._superseding:
            superseding.append((pool, block))
        if not old.refs:
            return
        self.holds.replace(pool, old, block)
        for ticket in self.tickets.values():
            if ticket.source is old and ticket.sequence is not None and not ticket.num_tokens:
                # It copies the one below for itself, and may share what others compute behind it.
                ticket.sequence.tables[pool.spec.group].refer_to_duplicate(ticket.index, block)

    def scope(
        self,
        salt: str | None,
        adapter_id: int | None,
        tenant_id: str | None = None,
        session_id: str | None = None,
        extra: bytes = b"",
    ) -> CacheScope:
        """The cache scope of these values: the same object for all blocks, as long as there are any."""
        parts = (salt, adapter_id, tenant_id, session_id, extra)
        scope, account = self._scopes.get(parts), account_for(self._accounts, tenant_id, salt)
        # Where quotas have come or gone, another one takes its place.
        if scope is None or scope.account is not account:
            scope = CacheScope(self.spec.model_fingerprint, *parts)
            scope.account = account
            names = [self._name(key) for key in (("tenant_id", tenant_id), ("salt", salt)) if key[1] is not None]
            for named in names:
                named.scopes.add(scope)
            scope.names = names
            self._scopes[parts] = scope
        return scope

    def _name(self, key: tuple[str, str | None]) -> AccountScopes:
        named = self._named.get(key)
        if named is None:
            named = self._named[key] = AccountScopes()
        return named

    def with_extra(self, scope: CacheScope, extra: bytes) -> CacheScope:
        """The scope with these extra bytes instead."""
        if extra == scope.extra:
            return scope
        return self.scope(scope.salt, scope.adapter_id, scope.tenant_id, scope.session_id, extra)

    def cached(self) -> Restored:
        """Indexed blocks, in use or not."""
        device = sum(pool.device.indexed for pool in self.pools)
        return Restored(device, sum(len(pool.tree.by_key) for pool in self.pools) - device)

    def _renewed(self, scope: CacheScope) -> CacheScope:
        """The scope itself, or the one that has replaced it since quotas have changed."""
        if not self._renews(scope):
            return scope
        return self.scope(scope.salt, scope.adapter_id, scope.tenant_id, scope.session_id, scope.extra)

    def _renews(self, scope: CacheScope) -> bool:
        return scope.account is not account_for(self._accounts, scope.tenant_id, scope.salt)

    def change_accounts(self, changed: Iterable[AccountKey]) -> Steps[None]:
        """Books the blocks of these accounts anew, whose quotas are new or gone.

        Until its turn a block counts against the quota of before; new blocks count against the new quota.
        """
        named = [one for key in changed if (one := self._named.get(key)) is not None]
        scopes = {scope for one in named for scope in one.scopes if self._renews(scope)}
        if not scopes:
            return
        for sequence in self.sequences.values():
            sequence.scope = self._renewed(sequence.scope)
        superseding: list[tuple[BlockPool, Block]] = []
        self._superseding.append(superseding)
        yield
        for pool in self.pools:
            for part in looks(range(len(pool.blocks))):
                self._rebook(pool, pool.blocks[part[0] : part[-1] + 1], scopes)
                yield
            # The blocks that they replace may not have been looked at.
            later = [block for other, block in superseding if other is pool and pool.blocks[block.index] is block]
            self._rebook(pool, later, scopes)
        self._superseding = [one for one in self._superseding if one is not superseding]

    def _rebook(self, pool: BlockPool, blocks: Iterable[Block | None], scopes: AbstractSet[CacheScope]) -> None:
        there = list(filter(None, blocks))
        # Not block by block in Python: most are of other scopes.
        for block in compress(there, map(scopes.__contains__, map(_SCOPE, there))):
            assert block.scope is not None
            pool.rebook(block, self._renewed(block.scope))

    def scopes(self) -> Iterator[CacheScope]:
        """All cache scopes. None may be added or freed meanwhile."""
        return iter(self._scopes.values())


class Scheduler:
    """One epoch of a scheduler."""

    def __init__(self, scheduler_id: str, epoch: int, deadline: float) -> None:
        self.scheduler_id = scheduler_id
        self.epoch = epoch
        self.deadline = deadline
        self.sequences: dict[int, Sequence] = {}
        # Names of executors that it has had sequences in.
        self.executors: set[str] = set()
        self.void: set[int] = set()
        self.sync_number = 0
        self.sync_answer = SyncAnswer()

    def has_void_sequences_in(self, executor: Executor) -> bool:
        """Whether it has sequences in an earlier registration of the executor, whose slots others have by now.

        Their steps stop when the scheduler has received that they are void and has released them.
        """
        return bool(self.void) and any(
            sequence.executor is not executor and sequence.executor.executor_id == executor.executor_id
            for sequence in self.sequences.values()
        )


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
                raise InvalidField(f"pools[{number}].{field}", f"must leave at most {MAX_SLOTS} slots in all together")


def _check_contents(spec: ExecutorSpec, group: int, path: str) -> None:
    """Generations are given for every slot, or for none."""
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
    """Empty pools of an executor."""
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
    told = any(len(slots) for tier in (spec.host_generations, spec.disk_generations) for slots in tier)
    same = (before.model_fingerprint, before.block_size) == (spec.model_fingerprint, spec.block_size)
    layouts = [
        [replace(pool, num_blocks=0, share_blocks=0, host_blocks=0, disk_blocks=0) for pool in one.pools]
        for one in (before, spec)
    ]
    return told and same and layouts[0] == layouts[1]


def divide_device_memory(executor: Executor, spec: ExecutorSpec, shares: Mapping[str, PoolShare]) -> None:
    """Gives every pool its first share of their common memory, or the share that an operator has set."""
    memory, pools = spec.memory_bytes, executor.pools
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
