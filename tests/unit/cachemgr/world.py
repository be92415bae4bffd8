"""A scheduler and a device that are simulated next to a real manager.

The device remembers for every slot and offset which tokens its K and V were computed from. A sequence that computes
checks what it attends to, so that a block which holds anything but what the manager says is found at once.
"""

import dataclasses
import random
from collections import Counter

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.manager import CacheManager
from cachemgr.operators.operator_memory import Kind
from cachemgr.operators.pins import Holds
from cachemgr.retention.leases import leases_of
from cachemgr.retention.priority import RULE
from cachemgr.types import (
    Admission,
    AdmitRequest,
    ExecutorSpec,
    ManagerConfig,
    PoolSpec,
    Restored,
    Retention,
    RetentionRange,
    SchedulerEpoch,
    SyncAnswer,
    SyncRequest,
    TierKind,
)
from tests.unit.cachemgr.journal import Journal, timeless
from tests.unit.cachemgr.live import BLOCK, Live
from tests.unit.cachemgr.memory import Memory
from tests.unit.cachemgr.watcher import Watcher

FINGERPRINT = b"f" * 32
CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0)


class World(Memory):
    """One executor "e", one scheduler "s", one manager of epoch 1."""

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
    ) -> None:
        super().__init__(windows)
        self.journal = Journal()
        self.watcher = Watcher()
        self.config = config
        self.manager = CacheManager(1, lambda: self.now, config, self.journal)
        self.num_blocks = num_blocks
        self.host_blocks, self.disk_blocks = host_blocks, disk_blocks
        self.block_bytes, self.memory_bytes = block_bytes or (0,) * len(windows), memory_bytes
        self.share_blocks = share_blocks or (0,) * len(windows)
        self.random = random.Random(seed)
        self.now = 0.0
        self.executor_epoch = 0
        self.scheduler_epoch = 0
        self.names = 0
        self.live: dict[str, Live] = {}
        # Released sequences whose last progress the next sync reports.
        self.leaving: list[Live] = []
        self.released: list[int] = []
        self.cancelled: list[int] = []
        self.fail_moves = False
        # Slots of sequences that wrote on when the manager had given the executor up.
        self.strays: set[tuple[int, int]] = set()
        self.trimmed: dict[int, int] = {}
        # Computed tokens of sequences that are gone, by handle.
        self.ended: dict[int, int] = {}
        self.tainted: set[int] = set()
        # While the store is read: blocks that are still to come, what the store holds, and the epoch that it is of.
        self.unread: list[BlockRecord] | None = None
        self.stored: dict[tuple[int, TierKind, int], BlockRecord] = {}
        self.stored_epoch = 0
        self.start_executor()
        self.start_scheduler()

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
            "e", self.executor_epoch, "m", FINGERPRINT, BLOCK, pools, memory_bytes=self.memory_bytes
        )
        return dataclasses.replace(settings, **self.contents(pools))

    def start_executor(self, remembered: list[BlockRecord] | None = None) -> Restored:
        """A newer epoch with an empty device, what is below stays; the scheduler gives all its sequences up."""
        self.executor_epoch += 1
        self.lose_device()
        restored = self.manager.register_executor(self.spec(), remembered or ())
        self.released += [live.handle for live in self.live.values()]
        self.live.clear()
        return restored

    @property
    def caller(self) -> SchedulerEpoch:
        """The scheduler as it names itself."""
        return SchedulerEpoch("s", self.scheduler_epoch)

    def start_scheduler(self) -> None:
        for live in [*self.live.values(), *self.leaving]:
            if live.has_news:
                self.leave_untold(live)
        self.scheduler_epoch += 1
        self.sync_number = 0
        self.live.clear()
        self.leaving.clear()
        self.released.clear()
        self.cancelled.clear()
        self.trimmed.clear()
        self.manager.register_scheduler("s", self.scheduler_epoch)

    def carry_out(self) -> None:
        """All that the manager does a part at a time, as giving back what a lost scheduler held, comes to its end."""
        while self.manager.is_behind:
            self.manager.expire()

    def restart_manager(self) -> Restored:
        """The manager is gone with its memory; what the journal has and the executor still holds comes back."""
        self.lose_manager()
        return self.manager.register_executor(self.spec(), list(self.journal.blocks.values()))

    def lose_manager(self) -> None:
        """Another manager, which only the scheduler has registered with."""
        if self.unread is not None:
            # Nothing was written over what was not read, and of another epoch only what is below counts.
            blocks = list(self.stored.values())
            if self.stored_epoch != self.executor_epoch:
                blocks = [below for block in blocks if (below := block.below()) is not None]
            self.journal.blocks = {block.place: block for block in blocks}
            self.journal.flush()
            self.unread = None
            self.journal.is_read = True
        shares = list(self.manager.queries.entries(Kind.SHARE))
        self.manager = CacheManager(self.manager.epoch + 1, lambda: self.now, self.config, self.journal)
        self.manager.operators.restore([], [], shares)
        self.done.clear()
        self.start_scheduler()

    def begin_recovery(self) -> None:
        """The manager is gone with its memory, and what the journal has is told later."""
        self.lose_manager()
        self.stored, self.stored_epoch = dict(self.journal.blocks), self.executor_epoch
        self.unread = sorted(self.stored.values(), key=lambda block: block.depth)
        self.journal.is_read = False
        self.manager.register_executor(self.spec(), later=True)

    def read_store(self, count: int) -> None:
        """So many remembered blocks are told; of another epoch only what is below."""
        assert self.unread is not None
        part: list[BlockRecord] = self.unread[:count]
        del self.unread[:count]
        if self.stored_epoch != self.executor_epoch:
            part = [below for block in part if (below := block.below()) is not None]
        self.manager.put_back("e", self.executor_epoch, part)

    def end_recovery(self) -> None:
        """The rest is told, and the store is written again."""
        if self.unread is None:
            return
        self.read_store(len(self.unread))
        self.manager.end_recovery("e", self.executor_epoch)
        self.unread = None
        self.journal.is_read = True
        if self.stored_epoch != self.executor_epoch:
            self.journal.blocks = {block.place: block for block in self.manager.queries.records("e")}
        self.journal.flush()

    def come_back(self) -> Restored:
        """The executor starts again after the manager has forgotten it, which asks the journal."""
        remembered = [below for block in self.journal.blocks.values() if (below := block.below()) is not None]
        self.journal.blocks = {block.place: block for block in remembered}
        restored = self.start_executor(remembered)
        # What the journal has of another epoch gives way to what is there.
        self.journal.blocks = {block.place: block for block in self.manager.queries.records("e")}
        self.journal.flush()
        return restored

    def expire_executor(self) -> None:
        """The manager gives the executor up."""
        self.end_recovery()
        for _ in range(2):
            self.now += self.config.lease_seconds * 0.6
            self.sync()
        self.manager.expire()
        assert not self.manager.knows_executor("e")

    def silence_executor(self) -> None:
        """The manager gives the executor up, and hears of it again before the scheduler has stopped its sequences."""
        self.strays |= {
            (group, slot) for live in self.live.values() for group, slots in enumerate(live.tables) for slot in slots
        }
        self.expire_executor()
        self.manager.register_executor(self.spec(), list(self.journal.blocks.values()))

    def renew(self) -> None:
        self.manager.renew_executor("e", self.executor_epoch, self.manager.epoch)

    def request(self, token_ids: list[int], name: str = "", **options: object) -> AdmitRequest:
        self.names += 1
        return AdmitRequest(name or f"q{self.names}", "s", self.scheduler_epoch, "e", tuple(token_ids), **options)

    def admit(self, token_ids: list[int], name: str = "", **options: object) -> Admission:
        request = self.request(token_ids, name, **options)
        admission = self.manager.admit(request)
        if admission.admitted:
            self.enter(request, admission, token_ids)
        return admission

    def enter(self, request: AdmitRequest, admission: Admission, token_ids: list[int]) -> Live:
        live = Live(
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
        )
        self.live[request.sequence_id] = live
        return live

    # Steps

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
            if (names is not None and name not in names) or not self.may_start(live, planned):
                continue
            count = min(most, self.room(live))
            if count > 0:
                work.append((live, count))
                planned[live.handle] = live.computed + count
        for live, _ in work:
            if not live.started:
                self.start(live, fail_copies)
        for live, count in work:
            self.write(live, count)
        for live, count in work:
            self.attend(live, count)
            live.computed += count
            if live.computed == len(live.tokens):
                live.tokens.append(self.random.randrange(3))

    def room(self, live: Live) -> int:
        """Tokens that the next step may compute."""
        return min(len(live.tokens), live.capacity) - live.computed

    def start(self, live: Live, fail: float) -> None:
        live.started = True
        live.tainted = live.tainted or live.wait_for in self.tainted
        for copy in live.copies:
            failed = self.random.random() < fail
            self.copy(copy, failed)
            live.tainted |= failed and copy.target_tier is TierKind.DEVICE
        if live.tainted:
            self.tainted.add(live.handle)

    # The scheduler

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
        moved = [live for name, live in self.live.items() if names is None or name in names]
        # Who leaves without news is not named, as by the scheduler.
        moved += [live for live in self.leaving if live.has_news]
        self.leaving = []
        self.random.shuffle(moved)
        fresh = [live.tokens[live.reported_tokens :] for live in moved]
        for live in moved:
            live.reported_tokens = len(live.tokens)
            live.reported_computed = live.computed
        return SyncRequest(
            "s",
            self.scheduler_epoch,
            self.manager.epoch,
            self.sync_number,
            self.step_number,
            [live.handle for live in moved],
            [live.computed for live in moved],
            [len(tokens) for tokens in fresh],
            [token for tokens in fresh for token in tokens],
            list(self.released),
            list(self.trimmed),
            list(self.trimmed.values()),
            list(self.cancelled),
        )

    def take(self, answer: SyncAnswer) -> None:
        by_handle = {live.handle: live for live in self.live.values()}
        for copy in answer.transfers:
            self.copy(copy, self.fail_moves)
        at = 0
        columns = zip(answer.extended_handles, answer.extended_groups, answer.extended_counts, strict=True)
        for handle, group, count in columns:
            by_handle[handle].tables[group].extend(answer.extended_slots[at : at + count])
            at += count
        for handle in answer.void_handles:
            if handle in by_handle:
                self.leave(by_handle[handle])

    def leave(self, live: Live) -> None:
        """Names the sequence in the next sync as released, and its copies as never sent when it has not started."""
        self.forget(live)
        self.leaving.append(live)
        self.released.append(live.handle)
        if not live.started:
            self.cancelled += [copy.ticket for copy in live.copies]

    def give_up_on(self, writer: Live) -> None:
        """Releases who waits for tokens that the writer has truncated; who waits for those hears of it by a sync."""
        for live in list(self.live.values()):
            waits = live.wait_for == writer.handle and not live.started and live.promised > len(writer.tokens)
            if waits and live.request.sequence_id in self.live:
                self.leave(live)

    def forget(self, live: Live) -> None:
        del self.live[live.request.sequence_id]
        self.ended[live.handle] = live.computed

    def confirm(self, limit: int | None = None) -> int:
        """Reports copies that have run or failed."""
        reported = dict(list(self.done.items())[:limit])
        for ticket in reported:
            del self.done[ticket]
        return self.manager.confirm_transfers(
            "e",
            self.executor_epoch,
            [ticket for ticket, succeeded in reported.items() if succeeded],
            [ticket for ticket, succeeded in reported.items() if not succeeded],
            self.step_number,
        )

    def run_executor_copies(self, limit: int | None = None, *, fail: bool = False) -> None:
        """What an executor does with the copies that come with its renewals: each is begun once."""
        begun = [copy for copy in self.manager.queries.executor_transfers("e") if copy.ticket not in self.done]
        # What they write comes behind the last step, as the next one's writes do.
        self.step_number += 1
        for copy in begun[:limit]:
            self.copy(copy, fail)
        if limit is None:
            self.confirm()

    def back_up(self) -> None:
        """Renews until there is nothing more to copy down."""
        self.renew()
        while self.manager.queries.executor_transfers("e"):
            self.run_executor_copies()
            self.renew()

    # Shorthands for tests

    def run(self, token_ids: list[int], name: str = "", *, generate: int = 0, **options: object) -> Admission:
        """Admits a sequence and computes its tokens and so many generated ones; reports all of it."""
        admission = self.admit(token_ids, name, **options)
        assert admission.admitted
        self.compute(self.live[name or f"q{self.names}"], len(token_ids) + generate)
        self.sync()
        return admission

    def compute(self, live: Live, length: int) -> None:
        """Computes so many tokens of one sequence; reports what it must to get blocks."""
        name = live.request.sequence_id
        while live.computed < length:
            self.step(min(5, length - live.computed), names={name})
            self.confirm()
            if live.computed < length and live.capacity <= live.computed:
                self.sync({name})
        assert self.live[name] is live

    def finish(self, name: str) -> None:
        """Releases a sequence by a sync."""
        self.leave(self.live[name])
        self.sync()

    def cache(self, token_ids: list[int], *, generate: int = 0, **options: object) -> Admission:
        """Computes these tokens and so many generated ones, and reports that together with the release."""
        admission = self.admit(token_ids, **options)
        assert admission.admitted
        live = self.live[f"q{self.names}"]
        self.compute(live, len(token_ids) + generate)
        self.leave(live)
        self.sync()
        return admission

    def cached_tokens(self, token_ids: list[int], **options: object) -> int:
        """What an admission of these tokens finds; leaves the sequence admitted and without open copies."""
        admission = self.admit(token_ids, **options)
        assert admission.admitted
        self.sync()
        return admission.cached_tokens

    @property
    def longest(self) -> int:
        """Tokens that fit into the smallest pool."""
        return min(pool.total_blocks for pool in self.manager.queries.pools()) * BLOCK

    @property
    def free(self) -> int:
        return min(pool.free_blocks for pool in self.manager.queries.pools())

    def check(self) -> None:
        assert self.manager.queries.check_pool() == []
        self.watcher.check(self.manager)
        records = {block.place: timeless(block) for block in self.manager.queries.records("e")}
        if self.unread is None:
            assert {place: timeless(block) for place, block in self.journal.blocks.items()} == records
        pools = self.manager._state.executors["e"].pools if self.manager.knows_executor("e") else []
        blocks = [block for pool in pools for block in pool.blocks if block is not None]
        ruled = {lease for block in blocks for lease in leases_of(block) if lease.wish.holder.startswith(RULE)}
        assert {lease for leases in self.manager._state.leases._of_rules.values() for lease in leases} == ruled
        if pools:
            check_holds(self.manager._state.executors["e"].holds)
        if pools and self.memory_bytes is not None:
            going = {(pool.spec.group, slot) for pool in pools for slot in pool.device.clearing}
            taking = self.resident - going - self.strays
            assert sum(self.block_bytes[group] for group, _ in taking) <= self.memory_bytes
        arriving = {(pool.spec.group, block.key) for pool in pools for block in pool.moving}
        for block in self.manager.queries.records("e"):
            arrived = block.tier is TierKind.DEVICE or self.generations.get(block.place) == block.generation
            assert arrived or (block.group, block.key) in arriving, f"{block.place} was not filled by the ticket"
            if arrived:
                self.check_content(block)
            if block.backup is not None:
                below = block.below()
                assert below is not None
                assert self.generations.get(below.place) == below.generation
                self.check_content(below)


def check_holds(holds: Holds) -> None:
    """What is counted of holds is what there is."""
    pinned = {kept for hold in holds if hold.pin for kept in hold.blocks}
    assert holds.held() == Counter(block for hold in holds for _, block in hold.blocks)
    assert holds._pinned == Counter(block for hold in holds if hold.pin for _, block in hold.blocks)
    assert holds._pinned_in == Counter(pool for pool, _ in pinned)
    assert holds._num_pins == sum(hold.pin for hold in holds)


def wish(priority: int, duration: float | None = None) -> Retention:
    """One priority and duration for all blocks."""
    return Retention((RetentionRange(0, None, priority, duration),), priority, duration)
