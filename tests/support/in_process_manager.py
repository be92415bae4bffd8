"""A real cache manager in this process, with a simulated scheduler, executor, store and consumer of events around it.

The device knows the contents of its slots. A sequence that computes checks everything that it attends to, so that a
wrong block is noticed at once. `World.check` compares all that the participants know.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.blocks.events import NO_BLOCK, Event
from cachemgr.blocks.extra_keys import cut_extra_keys
from cachemgr.errors import EventsGoneError
from cachemgr.manager import CacheManager
from cachemgr.operators.commands import OperatorCommands
from cachemgr.operators.operator_journal import Kind
from cachemgr.queries import Queries
from cachemgr.retention.leases import leases_of
from cachemgr.retention.priority import RULE
from cachemgr.sequences.holds import Holds
from cachemgr.slices import Slices
from cachemgr.types import (
    Admission,
    AdmitRequest,
    BlockView,
    EventKind,
    ExecutorSpec,
    Freed,
    ManagerConfig,
    PoolSpec,
    PoolView,
    Prefix,
    Restored,
    Retention,
    RetentionRange,
    SchedulerEpoch,
    SyncAnswer,
    SyncRequest,
    TierKind,
    Transfer,
)
from protos.kvcommon.eviction import Policy
from protos.kvcommon.eviction_message import EvictionPolicyRequest
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.device import Content, Device, contents

BLOCK = 4
FINGERPRINT = b"f" * 32
CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0)
# Leases of processes do not end while a test lets time pass.
PATIENT = dataclasses.replace(CONFIG, lease_seconds=1e12)


def snapshot(manager: CacheManager) -> list[Event]:
    """The cache at the last event, read at one moment."""
    last, registered = manager.queries.last_event, EventKind.EXECUTOR_REGISTERED
    found = [Event(last, registered, NO_BLOCK, executor=spec) for spec in manager.queries.executors()]
    for pool in manager._state.pools():
        found.append(Event(last, EventKind.CREATED, BlockView.of_pool(pool.pool_id)))
        for block in sorted(pool.tree.by_key.values(), key=lambda block: block.depth):
            view = pool.view(block)
            found.append(Event(last, EventKind.STORED, view))
            found += [
                Event(last, EventKind.LEASE_GRANTED, view, lease=manager._state.leases.view(lease))
                for lease in leases_of(block)
            ]
    return found


def retain(priority: int, duration: float | None = None) -> Retention:
    """One priority and duration for all blocks."""
    return Retention((RetentionRange(0, None, priority, duration),), priority, duration)


def asked(kind: str, **fields: object) -> EvictionPolicyRequest:
    """An eviction policy in the form of a request, by the name of its kind."""
    return EvictionPolicyRequest.of(common.EvictionPolicy(kind=f"EVICTION_KIND_{kind}", **fields))


# Policies with every course of lengths, small enough for prompts of a few blocks.
POLICIES = [
    asked("SLIDING_WINDOW", start_tokens=1, recent_tokens=6),
    asked("AVERAGE", max_cache_tokens=6, period_tokens=2, during_prefill=True),
    asked("H2O", max_cache_tokens=8, period_tokens=2),
    asked("SNAPKV", max_cache_tokens=5, recent_tokens=2, score_window_tokens=2),
    asked("LAST", max_cache_tokens=5),
    asked("NORM_SUM", start_tokens=4, recent_tokens=4, max_cache_tokens=12),
    asked("RANDOM", max_cache_tokens=6, start_tokens=1, recent_tokens=2, period_tokens=2, during_prefill=True),
    asked("KEYDIFF", max_cache_tokens=7, start_tokens=1, recent_tokens=2, period_tokens=3),
    asked("ADAPTIVE_WINDOW", start_tokens=1, recent_tokens=4, max_cache_tokens=17, score_window_tokens=2),
]


@dataclass(eq=False)
class Live:
    """A sequence from its scheduler's view."""

    request: AdmitRequest
    handle: int
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    copies: list[Transfer]
    wait_for: int = 0
    promised: int = 0
    started: bool = False
    reported_tokens: int = 0
    reported_computed: int = 0
    # Its tokens are wrong because a copy failed; the manager must not let a prompt hit them.
    tainted: bool = False
    policy: Policy | None = None
    prompt: int = 0
    evicted: int = 0
    # Slots to move to; empty when the sequence stays in its own slots.
    granted: list[int] | None = None
    moved: bool = False
    # Tokens computed before it moved, until the move is reported.
    clean: int | None = None
    # Lengths of an adaptive window: at the move, the length that it must have soon, and a shorter length until it is
    # reported.
    window: int = 0
    taken: int | None = None
    returned: int | None = None
    # The version of the weights that compute the sequence.
    weight_version: str = ""

    @property
    def has_news(self) -> bool:
        """Whether there is news for the manager."""
        return (self.reported_computed, self.reported_tokens) != (self.computed, len(self.tokens))

    @property
    def kept(self) -> int:
        return self.computed - self.evicted

    @property
    def capacity(self) -> int:
        return min(len(table) for table in self.tables) * BLOCK

    @property
    def stays(self) -> int:
        """Tokens that are kept when the sequence computes more."""
        return self.kept if self.policy is None else self.policy.kept_after(self.kept, self.computed, self.prompt)

    @property
    def must_move(self) -> bool:
        return not self.moved and self.stays < self.kept

    @property
    def adapts(self) -> bool:
        """Whether the sequence has an adaptive window that may change now."""
        return self.moved and self.policy is not None and self.policy.bounds is not None

    def expected(self) -> list[Any]:
        """The expected contents of its slots, in order: after a move its own mark, as no other sequence may hit these.

        After a failed copy nothing is expected.
        """
        if self.moved:
            return [("kept by", self.handle)] * (len(self.tables[0]) * BLOCK)
        if self.tainted:
            return [None] * len(self.tokens)
        scope = self.request.salt, self.request.adapter_id, self.weight_version
        return contents(scope, self.tokens, self.request.extra_keys)

    def cut(self, length: int) -> None:
        """The sequence's tokens from a length on are rejected."""
        del self.tokens[length:]
        extra_keys = tuple(cut_extra_keys(self.request.extra_keys, length))
        self.request = dataclasses.replace(self.request, extra_keys=extra_keys)
        self.computed = self.reported_computed = min(self.computed, length - 1)
        self.reported_tokens = length
        for table in self.tables:
            del table[-(-length // BLOCK) :]


@dataclass
class Journal:
    """A store that is a dictionary: the indexed blocks of an executor by slot."""

    executor_id: str = "e"
    epoch: int = 0
    blocks: dict[tuple[int, TierKind, int], BlockRecord] = field(default_factory=dict)
    # The contents that have reached the store.
    written: dict[tuple[int, TierKind, int], BlockRecord] = field(default_factory=dict)
    # False while stored blocks are not read yet: the journal may have removed them already.
    is_read: bool = True

    def cleared(self, executor_id: str, epoch: int) -> None:
        if executor_id != self.executor_id:
            return
        self.epoch = epoch
        self.blocks.clear()
        self.written.clear()

    def set(self, blocks: Iterable[BlockRecord]) -> None:
        """The store has exactly these blocks."""
        self.blocks = {block.tier_slot: block for block in blocks}
        self.flush()

    def flush(self) -> None:
        """All changes up to now reach the store."""
        self.written = dict(self.blocks)

    def fall_back(self) -> None:
        """Changes since the last flush are lost."""
        self.blocks = dict(self.written)

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        if executor_id != self.executor_id:
            return
        block = current()
        assert block is not None
        assert block.tier_slot == (group, tier, slot)
        self.blocks[block.tier_slot] = block

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        if executor_id != self.executor_id:
            return
        if self.is_read:
            del self.blocks[group, tier, slot]
        else:
            self.blocks.pop((group, tier, slot), None)


def _timeless(block: BlockRecord) -> BlockRecord:
    """The journal does not record each second, only whether a clock runs."""
    leases = (lease._replace(remaining=None if lease.remaining is None else 0.0) for lease in block.leases)
    return block._replace(leases=tuple(leases))


class Watcher:
    """A consumer of events, which starts anew with a snapshot if the manager is new or the consumer was too slow."""

    def __init__(self) -> None:
        self._manager: CacheManager | None = None
        self._seen = 0
        # Places of indexed blocks by pool and key.
        self._known: dict[tuple[str, bytes], tuple[TierKind, int]] = {}

    def check(self, manager: CacheManager) -> None:
        """Takes all events, and compares their result with the contents of the cache."""
        try:
            if manager is not self._manager:
                raise EventsGoneError("another manager")
            self._follow(manager.queries.events_after(self._seen, limit=1_000_000))
        except EventsGoneError:
            self._manager, self._known = manager, {}
            self._follow(snapshot(manager))
        self._seen = manager.queries.last_event
        there = {}
        for pool in manager.queries.pools():
            for _, view in filter(None, manager.queries.blocks(pool.pool_id)):
                if view.key:
                    there[pool.pool_id, view.key] = (view.tier, view.slot)
        assert self._known == there

    def _follow(self, events: Iterable[Any]) -> None:
        for event in events:
            name = (event.block.pool_id, event.block.key)
            if event.kind is EventKind.EXECUTOR_LOST:
                pool_ids = event.executor.pool_ids
                self._known = {name: at for name, at in self._known.items() if name[0] not in pool_ids}
            elif event.kind is EventKind.REMOVED:
                del self._known[name]
            elif event.kind in (EventKind.STORED, EventKind.UPDATED):
                assert (name in self._known) == (event.kind is EventKind.UPDATED)
                self._known[name] = (event.block.tier, event.block.slot)


class Shared:
    """The shared part of engines: a manager, of epoch 1 at first, and the time `now` in seconds."""

    def __init__(self, config: ManagerConfig) -> None:
        self.config = config
        self.now = 0.0
        self.worlds: list[World] = []
        self.manager = self._new_manager(1)

    def lose_manager(self, epochs: int = 1) -> None:
        """Another manager process, which only knows the operators' quotas."""
        shares = list(self.manager.queries.entries(Kind.SHARE))
        self.manager = self._new_manager(self.manager.epoch + epochs)
        self.manager.operators.restore([], [], shares)

    def _new_manager(self, epoch: int) -> CacheManager:
        return CacheManager(epoch, lambda: self.now, self.config, self)

    def pass_time(self, seconds: float, without: "World") -> None:
        """All engines but one renew their leases in the meantime."""
        self.now += seconds
        for world in self.worlds:
            if world is not without:
                world.sync()
                world.renew()

    # The journal of the manager: the journal of each engine has the engine's own blocks.

    def cleared(self, executor_id: str, epoch: int) -> None:
        for world in self.worlds:
            world.journal.cleared(executor_id, epoch)

    def stored(
        self, executor_id: str, group: int, tier: TierKind, slot: int, current: Callable[[], BlockRecord | None]
    ) -> None:
        for world in self.worlds:
            world.journal.stored(executor_id, group, tier, slot, current)

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        for world in self.worlds:
            world.journal.removed(executor_id, group, tier, slot)


class World:
    """One executor "e", one scheduler "s", and a manager. With an engine's name, the names end with it."""

    def __init__(
        self,
        num_blocks: int = 8,
        *,
        windows: tuple[int | None, ...] = (None,),
        host_blocks: int = 0,
        disk_blocks: int = 0,
        block_bytes: tuple[int, ...] = (),
        share_blocks: tuple[int, ...] = (),
        memory_bytes: int | None = None,
        config: ManagerConfig = CONFIG,
        seed: int = 0,
        engine: str = "",
        shared: Shared | None = None,
    ) -> None:
        self.executor_id, self.scheduler_id = f"e{engine}", f"s{engine}"
        self._engine = engine
        self.shared = shared or Shared(config)
        self.shared.worlds.append(self)
        self.device = Device(BLOCK, windows)
        self.windows = windows
        self.step_number = 0
        # Tickets of copies, and whether the copy has succeeded.
        self.done: dict[int, bool] = {}
        # Slices that wrote to slots of the device, by slot, without the manager's knowledge.
        self.untold: dict[tuple[int, int], int] = {}
        self.journal = Journal(self.executor_id)
        self.watcher = Watcher()
        self.config = config
        self.num_blocks = num_blocks
        self.host_blocks, self.disk_blocks = host_blocks, disk_blocks
        self.block_bytes, self.memory_bytes = block_bytes or (0,) * len(windows), memory_bytes
        self.share_blocks = share_blocks or (0,) * len(windows)
        self.random = random.Random(seed)
        self.executor_epoch = 0
        self.weight_version = ""
        self.scheduler_epoch = 0
        self.names = 0
        self.live: dict[str, Live] = {}
        # Released sequences whose last progress the next sync reports.
        self.leaving: list[Live] = []
        self.released: list[int] = []
        self.cancelled: list[int] = []
        self.fail_moves = False
        # Whether adaptive windows grow and shrink at random.
        self.changes_windows = False
        # Slots of sequences that still wrote after the manager had given up the executor.
        self.strays: set[tuple[int, int]] = set()
        self.trimmed: dict[int, int] = {}
        # Computed tokens of ended sequences, by handle.
        self.ended: dict[int, int] = {}
        self.tainted: set[int] = set()
        # While the store is read: blocks that are still to come, the store's contents, and the store's epoch.
        self.unread: list[BlockRecord] | None = None
        self.stored: list[BlockRecord] = []
        self.stored_epoch = 0
        # Epoch of the manager that the scheduler has named last in its session; 0 without a manager.
        self.steps_manager_epoch = 0
        self.start_executor()
        self.start_scheduler()

    @property
    def manager(self) -> CacheManager:
        return self.shared.manager

    @manager.setter
    def manager(self, manager: CacheManager) -> None:
        self.shared.manager = manager

    @property
    def now(self) -> float:
        return self.shared.now

    @now.setter
    def now(self, now: float) -> None:
        self.shared.now = now

    @property
    def queries(self) -> Queries:
        return self.manager.queries

    @property
    def operators(self) -> OperatorCommands:
        return self.manager.operators

    # Processes that start, die and register again

    def spec(self) -> ExecutorSpec:
        pools = [
            PoolSpec(
                group,
                self.num_blocks,
                window,
                block_bytes=self.block_bytes[group],
                host_blocks=self.host_blocks,
                disk_blocks=self.disk_blocks,
                share_blocks=self.share_blocks[group],
            )
            for group, window in enumerate(self.windows)
        ]
        settings = ExecutorSpec(
            self.executor_id,
            self.executor_epoch,
            "m",
            FINGERPRINT,
            BLOCK,
            pools,
            memory_bytes=self.memory_bytes,
            weight_version=self.weight_version,
            steps_manager_epoch=self.steps_manager_epoch,
        )
        return dataclasses.replace(settings, **self.device.registered(pools))

    def start_executor(self, stored: Iterable[BlockRecord] = ()) -> Restored:
        """A newer epoch with an empty device; lower tiers stay, and the scheduler gives up all its sequences."""
        self.executor_epoch += 1
        self.device.lose()
        self.done.clear()
        self.steps_manager_epoch = 0
        restored = self.manager.register_executor(self.spec(), stored)
        self.released += [live.handle for live in self.live.values()]
        self.live.clear()
        # The scheduler opens its session.
        self.steps_manager_epoch = self.manager.epoch
        return restored

    def update_weights(self, weight_version: str) -> Slices[int]:
        """The executor computes with other weights; the scheduler has all its sequences computed anew."""
        for live in list(self.live.values()):
            self.leave(live)
        self.weight_version = weight_version
        return self.manager.update_weights(self.executor_id, self.executor_epoch, weight_version)

    @property
    def caller(self) -> SchedulerEpoch:
        """The scheduler's id and epoch."""
        return SchedulerEpoch(self.scheduler_id, self.scheduler_epoch)

    def start_scheduler(self) -> None:
        for live in [*self.live.values(), *self.leaving]:
            if live.has_news:
                self.leave_untold(live)
        self.scheduler_epoch += 1
        self.sync_number = 0
        for known in (self.live, self.leaving, self.released, self.cancelled, self.trimmed):
            known.clear()
        self.manager.register_scheduler(self.scheduler_id, self.scheduler_epoch)
        self.steps_manager_epoch = self.manager.epoch

    def run_in_slices(self) -> None:
        """Finishes all work that the manager does in slices."""
        while self.manager.is_behind:
            self.manager.expire()

    def restart_manager(self) -> Restored:
        """The manager is lost with its memory; blocks of the journal that are still in the executor are restored."""
        self.lose_manager()
        return self.manager.register_executor(self.spec(), list(self.journal.blocks.values()))

    def lose_manager(self, epochs: int = 1) -> None:
        """A new manager, with which only the scheduler has registered."""
        self.break_off_recovery()
        self.shared.lose_manager(epochs)
        self.find_manager()

    def break_off_recovery(self) -> None:
        """The manager is gone."""
        if self.unread is not None:
            # Nothing has overwritten the blocks that were not read.
            self.journal.set(self._of_this_epoch(self.stored))
            self.unread = None
            self.journal.is_read = True

    def find_manager(self) -> None:
        """The scheduler registers with a new manager, after it has given up all its sequences."""
        self.done.clear()
        self.start_scheduler()

    def begin_recovery(self) -> None:
        """The manager is lost with its memory, and the journal is read later."""
        self.lose_manager()
        self.stored, self.stored_epoch = list(self.journal.blocks.values()), self.executor_epoch
        self.read_again()

    def read_again(self) -> None:
        """The executor registers, and the store is read later."""
        self.unread = sorted(self.stored, key=lambda block: block.depth)
        self.journal.is_read = False
        self.manager.register_executor(self.spec(), later=True)

    def _of_this_epoch(self, blocks: list[BlockRecord]) -> list[BlockRecord]:
        """These blocks; if they are of another epoch, only their copies in lower tiers."""
        if self.stored_epoch == self.executor_epoch:
            return blocks
        return [below for block in blocks if (below := block.below()) is not None]

    def read_store(self, count: int) -> None:
        """Restores `count` stored blocks."""
        assert self.unread is not None
        part = self.unread[:count]
        del self.unread[:count]
        self.manager.restore_blocks(self.executor_id, self.executor_epoch, self._of_this_epoch(part))

    def end_recovery(self) -> None:
        """Restores the other blocks; afterwards the store is written again."""
        if self.unread is None:
            return
        self.read_store(len(self.unread))
        self.manager.end_recovery(self.executor_id, self.executor_epoch)
        self.unread = None
        self.journal.is_read = True
        self.journal.set(
            self.queries.records(self.executor_id) if self.stored_epoch != self.executor_epoch else self._stored()
        )

    def _stored(self) -> list[BlockRecord]:
        return list(self.journal.blocks.values())

    def register_again(self) -> Restored:
        """The executor starts again after the manager, which asks the journal, has forgotten it."""
        stored = [below for block in self._stored() if (below := block.below()) is not None]
        self.journal.set(stored)
        restored = self.start_executor(stored)
        # The restored blocks replace the journal's blocks of another epoch.
        self.journal.set(self.queries.records(self.executor_id))
        return restored

    def expire_executor(self) -> None:
        """The manager gives up the executor."""
        self.end_recovery()
        for _ in range(2):
            self.shared.pass_time(self.config.lease_seconds * 0.6, without=self)
            self.sync()
        self.manager.expire()
        assert not self.manager.queries.knows_executor(self.executor_id)

    def silence_executor(self) -> None:
        """The manager gives up the executor, which registers again before the scheduler has stopped its sequences."""
        self.strays |= {
            (group, slot) for live in self.live.values() for group, slots in enumerate(live.tables) for slot in slots
        }
        self.expire_executor()
        self.manager.register_executor(self.spec(), self._stored())

    def renew(self) -> None:
        self.manager.renew_executor(self.executor_id, self.executor_epoch, self.manager.epoch)

    def pass_time(self, seconds: float) -> None:
        """All processes renew their leases in the meantime."""
        self.shared.pass_time(seconds, without=self)
        self.sync()
        self.renew()
        self.manager.expire()

    # Sequences

    def request(self, token_ids: list[int], name: str = "", **options: object) -> AdmitRequest:
        self.names += 1
        name = name or f"{self._engine}q{self.names}"
        return AdmitRequest(
            name, self.scheduler_id, self.scheduler_epoch, self.executor_id, tuple(token_ids), **options
        )

    def admit(self, token_ids: list[int], name: str = "", **options: object) -> Admission:
        request = self.request(token_ids, name, **options)
        admission = self.manager.admit(request)
        if admission.admitted:
            self.enter(request, admission, token_ids)
        return admission

    def enter(self, request: AdmitRequest, admission: Admission, token_ids: list[int]) -> Live:
        live = self.live[request.sequence_id] = Live(
            request,
            admission.sequence_handle,
            list(token_ids),
            admission.cached_tokens,
            [list(table.slots) for table in admission.block_tables],
            list(admission.transfers),
            admission.wait_for_handle,
            admission.cached_tokens,
            reported_tokens=len(token_ids),
            reported_computed=admission.cached_tokens,
            policy=admission.eviction_policy,
            prompt=len(token_ids),
            weight_version=self.weight_version,
        )
        return live

    @property
    def newest(self) -> Live:
        """The sequence that was admitted last without a name."""
        return self.live[f"{self._engine}q{self.names}"]

    def fork(self, parent: str, name: str, length: int | None = None) -> Live:
        """Forks a sequence; the fork is admitted."""
        first = self.live[parent]
        admission = self.manager.fork(self.caller, parent, name, length)
        assert admission.admitted
        tokens = first.tokens[:length]
        extra_keys = tuple(cut_extra_keys(first.request.extra_keys, len(tokens)))
        request = dataclasses.replace(first.request, sequence_id=name, extra_keys=extra_keys)
        return self.enter(request, admission, tokens)

    def truncate(self, name: str, length: int) -> Freed:
        freed = self.manager.truncate(self.caller, name, length)
        self.live[name].cut(length)
        return freed

    def release(self, name: str) -> SyncAnswer:
        """Releases a sequence without a report."""
        live = self.live[name]
        self.forget(live)
        self.released.append(live.handle)
        return self.sync(set())

    def leave(self, live: Live) -> None:
        """The next sync names the sequence as released, and its copies as never sent if it has not started."""
        self.forget(live)
        self.leaving.append(live)
        self.released.append(live.handle)
        if not live.started:
            self.cancelled += [copy.ticket for copy in live.copies]

    def give_up_on(self, writer: Live) -> None:
        """Releases sequences that wait for tokens that the writer has truncated; a sync tells other sequences."""
        for live in list(self.live.values()):
            waits = live.wait_for == writer.handle and not live.started and live.promised > len(writer.tokens)
            if waits and live.request.sequence_id in self.live:
                self.leave(live)

    def forget(self, live: Live) -> None:
        del self.live[live.request.sequence_id]
        self.ended[live.handle] = live.computed

    def leave_untold(self, live: Live) -> None:
        """The sequence leaves; its last computed tokens are never reported to the manager."""
        for group, table in enumerate(live.tables):
            self.untold |= {(group, slot): self.device.written.get((group, slot), 0) for slot in table}

    def has_untold(self, block: BlockRecord) -> bool:
        """Whether a slot of the device was written to without the manager's knowledge."""
        at = block.group, block.slot
        return block.tier is TierKind.DEVICE and self.device.written.get(at, 0) == self.untold.get(at)

    # Slices

    def may_start(self, live: Live, planned: dict[int, int]) -> bool:
        if live.started or not live.wait_for:
            return True
        if live.wait_for in planned:
            return planned[live.wait_for] >= live.promised
        return self.ended[live.wait_for] >= live.promised

    def step(self, most: int = 5, names: set[str] | None = None, fail_copies: float = False) -> None:
        """One device step: removals, copies, all writes, then all reads, as each layer writes before it attends.

        Copies fail with a probability.
        """
        self.step_number += 1
        planned = {live.handle: live.computed for live in self.live.values()}
        work = []
        for name, live in self.live.items():
            if live.adapts and (names is None or name in names):
                self.shorten(live)
        for name, live in self.live.items():
            if (names is not None and name not in names) or not self.may_start(live, planned):
                continue
            count = min(most, self.computable(live))
            if count > 0:
                work.append((live, count))
                planned[live.handle] = live.computed + count
        for live, _ in work:
            if not live.started:
                self.start(live, fail_copies)
        for live, count in work:
            self.evict(live)
            self.device.write(live.tables, live.expected(), live.kept, live.kept + count, self.step_number)
        for live, count in work:
            if not live.tainted:
                self.device.read(live.tables, live.expected(), 0 if live.moved else live.kept, live.kept + count)
            live.computed += count
            if live.computed == len(live.tokens):
                live.tokens.append(self.random.randrange(3))

    def computable(self, live: Live) -> int:
        """Tokens that the next step may compute."""
        if live.policy is None:
            return min(len(live.tokens), live.capacity) - live.computed
        if live.must_move and live.granted is None:
            return 0
        slots = len(live.granted) * BLOCK if live.must_move and live.granted else live.capacity
        left = min(len(live.tokens) - live.computed, slots - live.stays)
        most = live.policy.room(live.stays, live.computed, live.prompt)
        return left if most is None else min(left, most)

    def start(self, live: Live, fail: float) -> None:
        live.started = True
        live.tainted = live.tainted or live.wait_for in self.tainted
        for copy in live.copies:
            failed = self.random.random() < fail
            self.copy(copy, failed)
            live.tainted |= failed and copy.target_tier is TierKind.DEVICE
        if live.tainted:
            self.tainted.add(live.handle)

    def shorten(self, live: Live) -> None:
        """Makes the sequence's adaptive window shorter on request, and at random for lack of attention."""
        assert live.policy is not None
        assert live.policy.bounds is not None
        wanted = live.taken
        if wanted is None and self.changes_windows and self.random.random() < 0.2:
            wanted = self.random.randrange(live.policy.bounds.least, live.policy.window + 1, live.policy.period)
        if wanted is None or wanted >= live.policy.window or live.returned is not None:
            return
        live.policy, live.taken, live.returned = live.policy.with_window(wanted), None, wanted
        self.evict(live)
        assert live.policy.most_kept is not None
        del live.tables[0][-(-live.policy.most_kept // BLOCK) :]

    def evict(self, live: Live) -> None:
        """Drops tokens before a step; at the first time it moves to granted slots, or keeps its own first slots."""
        must_move, kept = live.must_move, live.stays
        if must_move and live.window:
            assert live.policy is not None
            live.policy = live.policy.with_window(live.window)
            kept = live.stays
        if kept == live.kept and not must_move:
            return
        if must_move:
            assert live.granted is not None
            assert live.policy is not None
            live.moved, live.clean = True, live.computed
            most = live.policy.most_kept
            live.tables = [list(live.granted) or live.tables[0][: None if most is None else -(-most // BLOCK)]]
        live.evicted = live.computed - kept
        self.device.write(live.tables, live.expected(), 0, kept, self.step_number)

    def copy(self, copy: Transfer, failed: bool = False) -> None:
        self.done[copy.ticket] = not failed
        self.device.copy(copy, self.step_number, failed=failed)

    def confirm(self, limit: int | None = None) -> int:
        """Reports copies that have run or failed."""
        reported = dict(list(self.done.items())[:limit])
        for ticket in reported:
            del self.done[ticket]
        return self.manager.confirm_transfers(
            self.executor_id,
            self.executor_epoch,
            [ticket for ticket, succeeded in reported.items() if succeeded],
            [ticket for ticket, succeeded in reported.items() if not succeeded],
            self.step_number,
        )

    def run_executor_copies(self, limit: int | None = None, *, fail: bool = False) -> None:
        """Runs, like an executor, the copies that come with renewals: each is begun once."""
        begun = [copy for copy in self.queries.executor_transfers(self.executor_id) if copy.ticket not in self.done]
        # The copies write after the last step, like the next step.
        self.step_number += 1
        for copy in begun[:limit]:
            self.copy(copy, fail)
        if limit is None:
            self.confirm()

    def open_write_through_copies(self) -> None:
        """Renews until there is nothing more to copy to lower tiers."""
        self.renew()
        while self.queries.executor_transfers(self.executor_id):
            self.run_executor_copies()
            self.renew()

    # Syncs

    def sync(self, names: set[str] | None = None) -> SyncAnswer:
        request = self.next_sync(names)
        answer = self.manager.sync(request)
        assert self.manager.sync(request) == answer
        self.released.clear()
        self.cancelled.clear()
        self.trimmed.clear()
        self.take(answer)
        return answer

    def next_sync(self, names: set[str] | None = None) -> SyncRequest:
        self.sync_number += 1
        running = [live for name, live in self.live.items() if names is None or name in names]
        # A sequence that leaves without news is not named.
        told = running + [live for live in self.leaving if live.has_news]
        moved = [live for live in [*running, *self.leaving] if live.clean is not None]
        clean = [live.clean for live in moved]
        self.leaving = []
        self.random.shuffle(told)
        fresh = [live.tokens[live.reported_tokens :] for live in told]
        for live in told:
            live.reported_tokens = len(live.tokens)
            live.reported_computed = live.computed
        asking = [live for live in running if live.must_move]
        asked = [self.asked_window(live) for live in asking]
        windows = {live.handle: wanted for live in running if (wanted := self.window_to_name(live)) is not None}
        for live in [*moved, *running]:
            live.clean = live.returned = None
        return SyncRequest(
            self.scheduler_id,
            self.scheduler_epoch,
            self.manager.epoch,
            self.sync_number,
            self.step_number,
            [live.handle for live in told],
            [live.computed for live in told],
            [len(tokens) for tokens in fresh],
            [token for tokens in fresh for token in tokens],
            list(self.released),
            list(self.trimmed),
            list(self.trimmed.values()),
            list(self.cancelled),
            evicting_handles=[live.handle for live in asking],
            evicting_window_tokens=asked if any(asked) else (),
            window_handles=list(windows),
            window_tokens=list(windows.values()),
            evicted_handles=[live.handle for live in moved],
            computed_tokens_before_eviction=clean,
        )

    def take(self, answer: SyncAnswer) -> None:
        by_handle = {live.handle: live for live in self.live.values()}
        for copy in answer.transfers:
            self.copy(copy, self.fail_moves)
        at = 0
        columns = zip(answer.extended_handles, answer.extended_groups, answer.extended_counts, strict=True)
        for handle, group, count in columns:
            assert by_handle[handle].clean is None, "a table grows that the sequence has left"
            by_handle[handle].tables[group].extend(answer.extended_slots[at : at + count])
            at += count
        for handle in answer.void_handles:
            if handle in by_handle:
                self.leave(by_handle[handle])
        at = 0
        for handle, count in zip(answer.evicting_handles, answer.evicting_counts, strict=True):
            slots = answer.evicting_slots[at : at + count]
            at += count
            assert by_handle[handle].granted in (None, slots)
            by_handle[handle].granted = slots
        for handle, window in zip(answer.evicting_handles, answer.evicting_window_tokens, strict=True):
            by_handle[handle].window = window
        for handle, window in zip(answer.window_handles, answer.window_tokens, strict=True):
            live = by_handle[handle]
            assert live.policy is not None
            if window > live.policy.window:
                live.policy = live.policy.with_window(window)
                assert len(live.tables[0]) * BLOCK >= (live.policy.most_kept or 0)
            live.taken = window if window < live.policy.window else None

    def asked_window(self, live: Live) -> int:
        """The adaptive window that the sequence asks for at its move; 0 without an adaptive window."""
        bounds = None if live.policy is None else live.policy.bounds
        if live.policy is None or bounds is None:
            return 0
        if not self.changes_windows:
            return bounds.least
        return live.window or self.random.randrange(bounds.least, bounds.most + 1, live.policy.period)

    def window_to_name(self, live: Live) -> int | None:
        """The adaptive window for the next sync: a window that became shorter, or now and then a longer window."""
        if live.returned is not None or not live.adapts:
            return live.returned
        assert live.policy is not None
        assert live.policy.bounds is not None
        if live.taken is not None or not self.changes_windows or self.random.random() < 0.5:
            return None
        longer = range(live.policy.window + live.policy.period, live.policy.bounds.most + 1, live.policy.period)
        return self.random.choice(longer) if longer else None

    # Shorthands for tests

    def run(self, token_ids: list[int], name: str = "", *, generate: int = 0, **options: object) -> Admission:
        """Admits a sequence, computes its tokens and `generated` new tokens, and reports everything."""
        admission = self.admit(token_ids, name, **options)
        assert admission.admitted
        self.compute(self.live[name] if name else self.newest, len(token_ids) + generate)
        self.sync()
        return admission

    def compute(self, live: Live, length: int) -> None:
        """Computes `count` tokens of one sequence; if nothing can be computed, a sync must help."""
        name = live.request.sequence_id
        while live.computed < length:
            before = live.computed
            for _ in range(2):
                self.step(min(5, length - live.computed), names={name})
                self.confirm()
                if live.computed > before:
                    break
                self.sync({name})
            else:
                raise AssertionError(f"{name} is stuck after {before} tokens")
        assert self.live[name] is live

    def work(self, rounds: int) -> None:
        """Rounds of a step, its confirmations, and a sync; everything is checked after each round."""
        for _ in range(rounds):
            self.step()
            self.confirm()
            self.sync()
            self.check()

    def finish(self, name: str) -> None:
        """Releases a sequence by a sync."""
        self.leave(self.live[name])
        self.sync()

    def cache(self, token_ids: list[int], *, generate: int = 0, **options: object) -> Admission:
        """Computes these tokens and `generated` new tokens, and reports them together with the release."""
        admission = self.admit(token_ids, **options)
        assert admission.admitted
        live = self.newest
        self.compute(live, len(token_ids) + generate)
        self.leave(live)
        self.sync()
        return admission

    def fill(self, first: int = 100, **options: object) -> Admission:
        """A sequence, called "fill" and its first token, that takes the whole device."""
        return self.run(list(range(first, first + self.num_blocks * BLOCK)), f"fill{first}", **options)

    def cached_tokens(self, token_ids: list[int], **options: object) -> int:
        """The tokens that an admission finds; leaves the sequence admitted and without open copies."""
        admission = self.admit(token_ids, **options)
        assert admission.admitted
        self.sync()
        return admission.cached_tokens

    def found(self, token_ids: list[int], **scope: object) -> int:
        """The tokens that a prompt would find in all tiers together; changes nothing."""
        return self.queries.explain(Prefix(tuple(token_ids), **scope), 0)[0].cached_tokens

    def tiers_of(self, token_ids: list[int], **scope: object) -> list[str]:
        """Tiers of the blocks of a prompt, in order."""
        blocks = self.queries.explain(Prefix(tuple(token_ids), **scope), 0)[0].blocks
        return [view.tier.name.lower() for view, _, _ in blocks]

    def tiers(self) -> dict[str, int]:
        """Indexed blocks of the first group by tier."""
        views = (view for _, view in filter(None, self.queries.blocks(f"{self.executor_id}/0")))
        return dict(Counter(view.tier.name.lower() for view in views if view.key))

    def priorities(self) -> dict[int, int]:
        """Priorities of indexed blocks of the first group, by first token; expired leases are ended before."""
        self.manager.expire()
        records = {
            block.slot: block for block in self.queries.records(self.executor_id) if block.tier is TierKind.DEVICE
        }
        views = [
            view
            for _, view in filter(None, self.queries.blocks(f"{self.executor_id}/0"))
            if view.key and view.tier is TierKind.DEVICE
        ]
        return {records[view.slot].token_ids[0]: view.priority for view in views}

    def first_tokens(self) -> set[int]:
        """First tokens of indexed blocks."""
        return {block.token_ids[0] for block in self.queries.records(self.executor_id)}

    @property
    def host(self) -> Any:
        """The host tier from the operators' view."""
        return self.pools()[0].lower_tiers[0]

    @property
    def lower_copies(self) -> int:
        return sum(block.lower_copy is not None for block in self.queries.records(self.executor_id))

    @property
    def longest(self) -> int:
        """Tokens that fit into the smallest pool."""
        return min(pool.total_blocks for pool in self.pools()) * BLOCK

    @property
    def free(self) -> int:
        return min(pool.free_blocks for pool in self.pools())

    def pools(self) -> list[PoolView]:
        """Pools of its executor, from the operators' view."""
        return [pool for pool in self.queries.pools() if pool.pool_id.startswith(f"{self.executor_id}/")]

    def executor(self) -> Any:
        """Its executor inside the manager."""
        return self.manager._state.executors[self.executor_id]

    # Checks

    def check(self) -> None:
        """Counts, contents, events, the store and leases of rules agree."""
        assert self.queries.check_pool() == []
        self.watcher.check(self.manager)
        records = {block.tier_slot: block for block in self.queries.records(self.executor_id)}
        pools = self.executor().pools if self.manager.queries.knows_executor(self.executor_id) else []
        if pools and self.unread is None:
            stored = {place: _timeless(block) for place, block in self.journal.blocks.items()}
            assert stored == {place: _timeless(block) for place, block in records.items()}
        blocks = [block for pool in self.manager._state.pools() for block in pool.blocks if block is not None]
        ruled = {lease for block in blocks for lease in leases_of(block) if lease.request.holder.startswith(RULE)}
        assert {lease for leases in self.manager._state.leases._of_rules.values() for lease in leases} == ruled
        if pools:
            check_holds(self.executor().holds)
        if pools and self.memory_bytes is not None:
            going = {(pool.spec.group, slot) for pool in pools for slot in pool.device.clearing}
            taking = self.device.resident - going - self.strays
            assert sum(self.block_bytes[group] for group, _ in taking) <= self.memory_bytes
        arriving = {(pool.spec.group, block.key) for pool in pools for block in pool.offloader.offloading}
        for block in records.values():
            arrived = block.tier is TierKind.DEVICE or self.is_filled(block)
            assert arrived or (block.group, block.key) in arriving, f"{block.tier_slot} was not filled by the ticket"
            if arrived:
                self.check_content(block)
            if block.lower_copy is not None:
                below = block.below()
                assert below is not None
                assert self.is_filled(below)
                self.check_content(below)

    def is_filled(self, block: BlockRecord) -> bool:
        return self.device.generations.get(block.tier_slot) == block.generation

    def check_content(self, block: BlockRecord) -> None:
        """Every token of a block in the index is in the device's memory."""
        for offset, token in enumerate(block.token_ids):
            held = self.device.slot(*block.tier_slot)[offset]
            assert isinstance(held, Content), f"slot {block.slot} holds {held}"
            assert held.scope == (block.salt, block.adapter_id, block.weight_version)
            assert (held.position, held.token[0]) == (block.depth * BLOCK + offset, token)


def check_holds(holds: Holds) -> None:
    """The counters of holds agree with the holds."""
    pinned = {kept for hold in holds if hold.pin for kept in hold.blocks}
    assert holds.held() == Counter(block for hold in holds for _, block in hold.blocks)
    assert holds._pinned == Counter(block for hold in holds if hold.pin for _, block in hold.blocks)
    assert holds._pinned_in == Counter(pool for pool, _ in pinned)
    assert holds._num_pins == sum(hold.pin for hold in holds)
