"""All calls that read a manager."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice

from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.block_record import BlockRecord
from cachemgr.blocks.cache_scopes import account_for
from cachemgr.blocks.events import Event
from cachemgr.errors import UnknownSequenceError
from cachemgr.operators.explain import explain
from cachemgr.operators.integrity import Part, parts
from cachemgr.operators.operator_journal import Entry
from cachemgr.operators.operator_journal import Kind as EntryKind
from cachemgr.operators.purge import matches
from cachemgr.operators.snapshot import SnapshotReader
from cachemgr.operators.state_dump import executor_state, line, rule_state, scheduler_state
from cachemgr.retention.hint_actions import with_retention
from cachemgr.retention.leases import leases_of
from cachemgr.sequences import estimates, prefix_match
from cachemgr.sequences.admission import check_request, new_sequence, plan_admission
from cachemgr.sequences.clients import Executor, Scheduler
from cachemgr.sequences.holds import Hold
from cachemgr.sequences.sequence import Sequence
from cachemgr.state import ManagerState, pool_view
from cachemgr.types import (
    AccountKey,
    AdmitRequest,
    BlockFilter,
    BlockView,
    ExecutorSpec,
    Explanation,
    GhostReport,
    HoldView,
    LeaseView,
    PinRecord,
    PoolView,
    PoolViolation,
    Prefix,
    PrefixView,
    Preview,
    Quota,
    RetentionRule,
    TierKind,
    Transfer,
    WindowChange,
)
from protos.errors import InvalidField
from protos.kvcommon.eviction import Kind

# The limit on copies in the answer to a renewal, since a message holds 4 MB.
MAX_TRANSFERS = 10_000


class Queries:
    """Calls that change nothing."""

    def __init__(self, state: ManagerState) -> None:
        self._state = state

    def check_pool(self, pool_id: str = "") -> list[PoolViolation]:
        """Recounts a pool, or all pools, from scratch. Raises UnknownPoolError."""
        return [found for part in self.check_pool_in_parts(pool_id) for found in part() if found is not None]

    def check_pool_in_parts(self, pool_id: str = "") -> list[Callable[[], Iterator[PoolViolation | None]]]:
        """Like `check_pool`, but part by part, with None after each small piece.

        `fingerprint` must not change between the pieces of a part, but may change between two parts.
        """
        pools = self._state.pools(pool_id)
        return [
            partial(self._check_part, executor, part)
            for executor in self._state.executors.values()
            for part in parts(executor, pools)
        ]

    def _check_part(self, executor: Executor, part: Part) -> Iterator[PoolViolation | None]:
        # An executor may have been lost meanwhile, or its pools may belong to a new epoch.
        if self._state.executors.get(executor.executor_id) is executor:
            yield from part()

    def fingerprint(self) -> object:
        """A value that changes with every change of a block or lease, but not with time and renewals.

        Tokens of a sequence within its last block do not count, or the value would change with every step.
        """
        return (
            self._state.number,
            self._state.events.last,
            [(one.handle, one.computed // one.block_size, one.num_blocks) for one in self._state.sequences.values()],
            [
                (one.executor_id, one.epoch, len(one.tickets), len(list(one.holds)))
                for one in self._state.executors.values()
            ],
            [
                (pool.lru_clock, pool.honoured_leases, pool.broken_leases, pool.share_number, len(pool.pending))
                for pool in self._state.pools()
            ],
            [
                (tier.used, tier.cached, tier.to_withhold, len(tier.accounts.shares), tier.accounts.protected)
                for pool in self._state.pools()
                for tier in pool.tiers
            ],
        )

    def pools(self) -> list[PoolView]:
        """All pools by name."""
        return [pool_view(pool) for pool in self._state.pools()]

    def pool(self, pool_id: str) -> PoolView:
        """One pool. Raises UnknownPoolError."""
        return pool_view(self._state.pool(pool_id))

    def blocks(self, pool_id: str, after_index: int = 0) -> Iterator[tuple[int, BlockView] | None]:
        """Yields used and cached blocks with their indexes; None for empty slots. Raises UnknownPoolError."""
        pool = self._state.pool(pool_id)
        return (None if block is None else (block.index, pool.listed(block)) for block in _from(pool, after_index))

    def cached_views(self, pool_id: str, keys: Iterable[bytes]) -> Iterator[BlockView]:
        """Yields a pool's blocks with these keys that are indexed at their turn; none for an unknown pool."""
        for pool in self._state.pools():
            if pool.pool_id == pool_id:
                yield from (pool.view(block) for key in keys if (block := pool.tree.by_key.get(key)) is not None)

    def filtered_blocks(self, selected: BlockFilter, after_index: int = 0) -> Iterator[tuple[int, BlockView] | None]:
        """Yields blocks of one pool that a filter matches, None for other blocks.

        Raises UnknownPoolError, InvalidField, UnknownExecutorError.
        """
        for _, pool, among in self._state.filtered(selected):
            for block in _from(pool, after_index):
                if block is not None and (among is None or block in among) and matches(pool, block, selected):
                    yield block.index, pool.listed(block)
                else:
                    yield None

    def prefixes(self, selected: BlockFilter, after_index: int = 0) -> Iterator[PrefixView | None]:
        """Yields cached chains of one pool whose last block a filter matches, None for other blocks.

        Raises the same errors as `filtered_blocks`.
        """
        for _, pool, among in self._state.filtered(selected):
            for block in _from(pool, after_index):
                is_last = block is not None and block.parent is not None and block.children is None
                if block is None or not is_last or (among is not None and block not in among):
                    yield None
                else:
                    yield _prefix_view(pool, block) if matches(pool, block, selected) else None

    def leases(
        self, pool_id: str, holder: str, after_index: int = 0
    ) -> Iterator[tuple[int, BlockView, LeaseView] | None]:
        """Yields leases of a pool by index of their block, with None after each slot.

        holder: only the leases of this holder, unless empty.

        Raises UnknownPoolError.
        """
        pool = self._state.pool(pool_id)
        for block in _from(pool, after_index):
            if block is not None:
                for lease in leases_of(block):
                    if holder in ("", lease.request.holder):
                        yield block.index, pool.view(block), self._state.leases.view(lease)
            yield None

    def holds(self, owner: str = "") -> Iterator[HoldView]:
        """Yields holds and pins by executor, then oldest first, one item per owner; all owners if `owner` is empty."""
        now = self._state.leases.now
        for _, executor in sorted(self._state.executors.items()):
            for hold in executor.holds:
                scope = hold.blocks[0][1].scope if hold.blocks else None
                salt = None if scope is None else scope.salt
                for name, end in sorted(hold.owners.items()):
                    if owner in ("", name):
                        left = max(0.0, end - now)
                        yield HoldView(hold.name, hold.pin, name, left, executor.executor_id, len(hold.blocks), salt)

    def executor_transfers(self, executor_id: str) -> list[Transfer]:
        """Open copies that no scheduler sends, in the order in which they must run, as many as a message holds.

        Empty for an unknown executor, and while void sequences of an earlier registration may still run steps: their
        slots now have other users.
        """
        executor = self._state.executors.get(executor_id)
        if executor is None or any(one.has_void_sequences_in(executor) for one in self._state.schedulers.values()):
            return []
        transfers = (ticket.transfer for ticket in executor.tickets.values() if ticket.scheduler is None)
        return list(islice(transfers, MAX_TRANSFERS))

    def scheduler_epoch(self, scheduler_id: str) -> int:
        """The newest epoch of a scheduler; 0 if unknown."""
        known = self._state.schedulers.get(scheduler_id)
        return 0 if known is None else known.epoch

    def scheduler_ids(self) -> list[str]:
        """Schedulers whose lease has not ended."""
        return list(self._state.schedulers)

    def rules(self) -> list[RetentionRule]:
        return [rule.spec for rule in self._state.rules]

    def rule(self, name: str) -> RetentionRule:
        """One rule. Raises UnknownRuleError."""
        return self._state.rules.get(name).spec

    def quotas(self) -> Iterator[tuple[Quota, str, int, int]]:
        """Yields the quota of each account once per pool, with the account's device and host blocks in the pool.

        If there is no pool, each quota comes once, with an empty name for the pool.
        """
        for _, account in sorted(self._state.accounts.items()):
            pools = self._state.pools()
            for pool in pools:
                device, host = (tier.accounts.blocks_of(account) for tier in pool.tiers[:2])
                yield account.quota, pool.pool_id, device, host
            if not pools:
                yield account.quota, "", 0, 0

    def account_of(self, tenant_id: str | None, salt: str | None) -> AccountKey | None:
        """The account that blocks of a tenant under a salt count against; None if there is no quota."""
        account = account_for(self._state.accounts, tenant_id, salt)
        return None if account is None else account.key

    def knows_executor(self, executor_id: str) -> bool:
        return executor_id in self._state.executors

    def entries(self, kind: EntryKind, executor_id: str = "") -> Iterator[Entry]:
        """Yields all entries of a kind; for pins, one executor's pins, oldest first."""
        match kind:
            case EntryKind.RULE:
                yield from self.rules()
            case EntryKind.QUOTA:
                yield from (account.quota for account in self._state.accounts.values())
            case EntryKind.SHARE:
                yield from self._state.shares.values()
            case EntryKind.PIN:
                executor = self._state.executors.get(executor_id)
                for hold in () if executor is None else executor.holds:
                    if hold.pin:
                        yield _pin_record(hold, self._state.leases.now)

    def entry(self, kind: EntryKind, name: str, executor_id: str = "") -> Entry | None:
        """One present entry; None if there is none."""
        match kind:
            case EntryKind.RULE:
                return self.rule(name) if name in self._state.rules else None
            case EntryKind.QUOTA:
                field, _, account = name.partition("/")
                found = self._state.accounts.get((field, account))
                return None if found is None else found.quota
            case EntryKind.SHARE:
                return self._state.shares.get(name)
            case EntryKind.PIN:
                executor = self._state.executors.get(executor_id)
                hold = None if executor is None else executor.holds.get(name)
                return None if hold is None else _pin_record(hold, self._state.leases.now)

    def block_pools(self, pool_id: str = "") -> list[BlockPool]:
        """All pools by name, or the named pool, to read their counters. Raises UnknownPoolError."""
        return self._state.pools(pool_id)

    @property
    def now(self) -> float:
        """The time of the last call that changed something."""
        return self._state.leases.now

    def ghosts(self, executor_id: str, since: float | None = None) -> tuple[GhostReport, PoolView] | None:
        """The report of ghost caches since a time, and their pool; None without ghosts. Raises UnknownExecutorError."""
        executor = self._state.executor(executor_id)
        ghosts = executor.ghosts
        return None if ghosts is None else (ghosts.report(since), pool_view(ghosts.pool))

    def explain(self, prefix: Prefix, group: int) -> list[Explanation]:
        """Explains where the blocks of a prompt are, per executor. Raises InvalidField, UnknownExecutorError."""
        found = []
        for executor in self._state.check_prefix("prefix", prefix):
            if group >= len(executor.pools):
                if prefix.executor_id:
                    raise InvalidField("group", f"must be less than {len(executor.pools)}")
                continue
            sequence = Sequence.probe(executor, prefix)
            cached = prefix_match.PrefixMatcher(sequence).longest(prefix_match.Partial.COPY).tokens
            found.append(explain(executor, executor.pools[group], prefix, cached, self._state.leases))
        if group and not found:
            raise InvalidField("group", "is in no executor")
        return found

    def explain_sequence(self, sequence_id: str, group: int) -> list[Explanation]:
        """Like `explain`, for the tokens of a live sequence.

        Raises UnknownSequenceError, InvalidField, and UnknownExecutorError if the sequence's executor is lost.
        """
        sequence = self._state.sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequenceError(f"there is no sequence {sequence_id!r}", fields={"sequence_id": "is not known"})
        scope, executor_id = sequence.scope, sequence.executor.executor_id
        tokens = tuple(sequence.tokens)
        return self.explain(Prefix(tokens, executor_id, scope.salt, scope.adapter_id, sequence.extra_keys), group)

    def sequences(self, after_handle: int = 0) -> Iterator[Sequence]:
        """Yields live sequences by handle, to read only."""
        return (sequence for sequence in list(self._state.sequences.values()) if sequence.handle > after_handle)

    def evicted_sequences(self) -> dict[Kind, int]:
        """Counts sequences that have begun to evict tokens, by kind of policy."""
        return dict(self._state.evicted)

    def window_changes(self) -> dict[WindowChange, int]:
        """Counts changes of adaptive windows since the start."""
        return {change: self._state.windows[change] for change in WindowChange}

    def preview(self, request: AdmitRequest, max_new_tokens: int) -> Preview:
        """The outcome of an admission; changes nothing. Raises as `admit` does, except for sequences that exist.

        A request without a scheduler_id belongs to no scheduler.
        """
        tokens = check_request(request)
        request = with_retention(request)
        if request.scheduler_id:
            scheduler = self._state.scheduler(request.scheduler_id, request.scheduler_epoch)
        else:
            scheduler = Scheduler("", 0, math.inf)
        executor = self._state.executor(request.executor_id)
        rules, config = self._state.rules, self._state.config
        sequence = new_sequence(request, tokens, scheduler, executor, rules, config)
        plan = plan_admission(request, sequence, config, max_new_tokens)
        missing = 1 if scheduler.has_void_sequences_in(executor) else plan.missing_blocks
        needed = estimates.before_admission(sequence, plan.match.blocks, max_new_tokens)
        return Preview(not missing, missing, plan.match.tokens, needed)

    def executors(self) -> list[ExecutorSpec]:
        """All executors by name, without the contents of their memory."""
        return [executor.spec for executor in self._executors()]

    def indexed_keys(
        self, pool: BlockPool, after_index: int, limit: int, is_meant: Callable[[Block], bool] | None = None
    ) -> dict[TierKind, list[bytes]]:
        """Keys of the indexed blocks among the `limit` slots after an index, by tier; `is_meant` selects blocks."""
        found: dict[TierKind, list[bytes]] = {}
        for tier in pool.tiers:
            first, end = tier.offset + 1, tier.offset + tier.size + 1
            part = pool.blocks[max(first, after_index + 1) : min(end, after_index + 1 + limit)]
            keys = [
                block.key
                for block in part
                if block is not None and block.parent is not None and (is_meant is None or is_meant(block))
            ]
            if keys:
                found[tier.kind] = keys
        return found

    def records(self, executor_id: str) -> Iterator[BlockRecord]:
        """Yields an executor's indexed blocks by index, each as of its turn; none for an unknown executor."""
        executor = self._state.executors.get(executor_id)
        for pool in executor.pools if executor is not None else ():
            yield from pool.records()

    def state(self) -> Iterator[str]:
        """Yields the state that later calls depend on, as lines of JSON."""
        for part in self.state_outline():
            yield from (part,) if isinstance(part, str) else part

    def state_outline(self) -> Iterator[str | Iterator[str]]:
        """Like `state`, but with iterators for the long parts.

        The caller must read the outline without a break. Its iterators then yield the state of that moment as long as
        `fingerprint` does not change.
        """
        yield line(
            "manager",
            epoch=self._state.epoch,
            now=self._state.leases.now,
            number=self._state.number,
            last_event=self._state.events.last,
        )
        yield (rule_state(spec) for spec in self.rules())
        quotas = [account.quota for _, account in sorted(self._state.accounts.items())]
        yield (line("quota", **asdict(quota)) for quota in quotas)
        for _, share in sorted(self._state.shares.items()):
            yield line("share", **share._asdict())
        for _, scheduler in sorted(self._state.schedulers.items()):
            yield scheduler_state(scheduler)
        for _, executor in sorted(self._state.executors.items()):
            yield from executor_state(executor)

    @property
    def last_event(self) -> int:
        """Number of the newest event, 0 before the first."""
        return self._state.events.last

    @property
    def scrubs(self) -> int:
        """A counter that grows whenever forgotten token ids have been removed from the events."""
        return self._state.events.scrubs

    def snapshot(self) -> SnapshotReader:
        """A reader of the whole cache, slice by slice."""
        return SnapshotReader(self._state.events, self._state.leases, self._executors)

    def _executors(self) -> list[Executor]:
        return [executor for _, executor in sorted(self._state.executors.items())]

    def events_after(self, number: int, limit: int = 1000) -> list[Event]:
        """Up to `limit` events with the next numbers. Raises EventsGoneError."""
        return self._state.events.after(number, limit)


def _pin_record(hold: Hold, now: float) -> PinRecord:
    ((owner, end),) = hold.owners.items()
    blocks = tuple((pool.spec.group, block.key) for pool, block in hold.blocks)
    # Negative if the pin is overdue, until `expire` ends the pin.
    return PinRecord(hold.name, owner, end - now, blocks)


def _from(pool: BlockPool, after_index: int) -> Iterator[Block | None]:
    # By index, as blocks may come and go during the iteration, and copying the list would take as long as many calls.
    for index in range(after_index + 1, len(pool.blocks)):
        yield pool.blocks[index] if index < len(pool.blocks) else None


def _prefix_view(pool: BlockPool, last: Block) -> PrefixView:
    counts: dict[TierKind, int] = {}
    least = last.priority
    node: Node | None = last
    while isinstance(node, Block):
        kind = pool.tier_of(node).kind
        counts[kind] = counts.get(kind, 0) + 1
        least = min(least, node.priority)
        node = node.parent
    view = pool.view(last)
    return PrefixView(last.index, view, last.depth * pool.block_size + view.num_tokens, counts, least)
