"""A cache manager of one pool in memory: allocates for real, shares full blocks, also those still being computed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf import duration_pb2

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.errors import ServiceError

AHEAD = 8


class NoParentError(ServiceError):
    """A fork of a sequence that is not there, or not as it should be."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_PARENT"


class LostError(ServiceError):
    """The manager does not know the caller's epoch."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MANAGER_RESTARTED"


@dataclass
class Block:
    """One slot."""

    slot: int
    references: int = 0
    key: tuple[int, ...] | None = None
    # Handle of the sequence that still has to compute it; 0 once it is computed.
    writer: int = 0


@dataclass
class Live:
    """One sequence."""

    sequence_id: str
    handle: int
    token_ids: list[int]
    computed: int
    cached: int
    wait_for: int
    store: bool
    void: bool = False
    blocks: list[Block] = field(default_factory=list)


class FakeManager(rpc.CacheManagerServiceServicer):
    """Keeps `faults` about what a scheduler did wrong. `settled()` waits until no sequence is live."""

    def __init__(self, *, num_blocks: int = 100, block_size: int = 4, reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        self.epoch = 1
        self.faults: list[str] = []
        self.live: dict[int, Live] = {}
        self.syncs = 0
        self.trims = 0
        self.refusals = 0
        self.admissions = 0
        self.admitted_ids: list[str] = []
        self.forked_ids: list[str] = []
        self.refuses_schedulers = False
        # Forks to come that are refused, as when the parent is not settled.
        self.unsettled = 0
        self.void_next: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self._changed = asyncio.Condition()
        self._next_handle = 1
        self._scheduler_epoch = 0
        self._sync_number = 0
        self._answer = pb.SyncSequencesResponse()
        self._reset()

    def _reset(self) -> None:
        self.live = {}
        self._index: dict[tuple[int, ...], Block] = {}
        self._free = [Block(slot) for slot in range(self.num_blocks, 0, -1)]
        self._cached: dict[int, Block] = {}
        # Source and target of open copies, by ticket.
        self._tickets: dict[int, tuple[Block, Block]] = {}
        self._scheduler_epoch = 0

    def restart(self) -> None:
        """Forgets everything, as a process that dies and comes back. Handles go on."""
        self.epoch += 1
        self._reset()

    def executor_lost(self) -> None:
        """Voids what every block holds and all live sequences, as when the executor announces a newer epoch."""
        for live in self.live.values():
            live.store, live.void = False, True
            self.void_next.add(live.sequence_id)
        for block in self._index.values():
            block.key, block.writer = None, 0
        self._index.clear()
        self._free += self._cached.values()
        self._cached.clear()

    @property
    def free(self) -> int:
        """Blocks that may be taken."""
        return len(self._free) + len(self._cached)

    async def settled(self) -> None:
        """Waits until every block is free or cached."""
        await self._until(lambda: not self.live)
        assert self.free == self.num_blocks

    async def admitted(self, count: int) -> None:
        """Waits until so many sequences are live."""
        await self._until(lambda: len(self.live) >= count)

    async def registered(self) -> None:
        """Waits until a scheduler has come."""
        await self._until(lambda: self._scheduler_epoch > 0)

    async def asked(self, count: int) -> None:
        """Waits until there were so many calls for admission, answered or not."""
        await self._until(lambda: self.admissions >= count)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed, asyncio.timeout(20):
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def RegisterScheduler(
        self, request: pb.RegisterSchedulerRequest, context: object
    ) -> pb.RegisterSchedulerResponse:
        if self.refuses_schedulers:
            raise LostError("no scheduler is taken")
        assert request.scheduler_epoch >= self._scheduler_epoch
        for live in list(self.live.values()):
            self._release(live)
        for ticket in list(self._tickets):
            self.confirm(ticket)
        self._scheduler_epoch = request.scheduler_epoch
        self._sync_number = 0
        await self._notify()
        return pb.RegisterSchedulerResponse(manager_epoch=self.epoch, lease_duration=duration_pb2.Duration(seconds=3))

    async def AdmitSequences(self, request: pb.AdmitSequencesRequest, context: object) -> pb.AdmitSequencesResponse:
        self.admissions += 1
        await self._notify()
        answers: list[pb.AdmitSequenceResponse] = []
        for admission in request.admissions:
            answers.append(await self.AdmitSequence(admission, context))
            if not answers[-1].admitted:
                break
        return pb.AdmitSequencesResponse(answers=answers)

    async def AdmitSequence(self, request: pb.AdmitSequenceRequest, context: object) -> pb.AdmitSequenceResponse:
        await self.gate.wait()
        self._check(request.scheduler_epoch, self.epoch)
        token_ids = list(request.token_ids)
        shared = [] if request.no_read or not self.reuse else self._match(token_ids)
        needed = -(-(len(token_ids) + 1) // self.block_size) - len(shared)
        available = self.free - sum(block.references == 0 for block in shared)
        if needed > available:
            self.refusals += 1
            if not self.live:
                self.faults.append(f"{request.sequence_id} can never fit")
            return pb.AdmitSequenceResponse(manager_epoch=self.epoch, blocks_short=needed - available)
        cached = len(shared) * self.block_size
        writers = [block.writer for block in shared if block.writer]
        live = Live(
            request.sequence_id, self._next_handle, token_ids, cached, cached, writers[-1] if writers else 0,
            store=not request.no_store,
        )  # fmt: skip
        self._next_handle += 1
        for block in shared:
            self._claim(block)
        live.blocks = shared + [self._take() for _ in range(needed)]
        self._promise(live)
        self.live[live.handle] = live
        self.admitted_ids.append(request.sequence_id)
        await self._notify()
        return pb.AdmitSequenceResponse(
            manager_epoch=self.epoch,
            admitted=True,
            sequence_handle=live.handle,
            cached_tokens=cached,
            wait_for_handle=live.wait_for,
            capacity_tokens=len(live.blocks) * self.block_size,
            block_tables=[pb.BlockTable(group=0, slots=[block.slot for block in live.blocks])],
        )

    async def ForkSequence(self, request: pb.ForkSequenceRequest, context: object) -> pb.ForkSequenceResponse:
        await self.gate.wait()
        parent = next((live for live in self.live.values() if live.sequence_id == request.parent_sequence_id), None)
        self.unsettled -= 1
        if parent is None or parent.void or self.unsettled >= 0:
            raise NoParentError("there is nothing to share")
        token_ids = parent.token_ids[: request.num_tokens]
        if parent.computed < request.num_tokens:
            self.faults.append(f"{request.sequence_id} comes before its parent's prompt is computed")
        computed = min(parent.computed, len(token_ids) - 1)
        full, copied = divmod(computed, self.block_size)
        needed = -(-len(token_ids) // self.block_size) - full
        if needed > self.free:
            self.refusals += 1
            return pb.ForkSequenceResponse(blocks_short=needed - self.free)
        live = Live(request.sequence_id, self._next_handle, token_ids, computed, computed, 0, store=parent.store)
        self._next_handle += 1
        live.blocks = parent.blocks[:full]
        for block in live.blocks:
            self._claim(block)
        live.blocks += [self._take() for _ in range(needed)]
        answer = pb.ForkSequenceResponse(
            admitted=True,
            sequence_handle=live.handle,
            cached_tokens=computed,
            block_tables=[pb.BlockTable(group=0, slots=[block.slot for block in live.blocks])],
        )
        if copied:
            source, target = parent.blocks[full], live.blocks[full]
            for block in (source, target):
                self._claim(block)
            self._tickets[live.handle] = source, target
            answer.transfers.add(ticket=live.handle, source_slot=source.slot, target_slot=target.slot)
        self.live[live.handle] = live
        self.forked_ids.append(live.sequence_id)
        await self._notify()
        return answer

    def confirm(self, ticket: int) -> None:
        """A copy has run, or never will."""
        for block in self._tickets.pop(ticket, ()):
            self._drop(block)

    refuse = confirm

    async def SyncSequences(self, request: pb.SyncSequencesRequest, context: object) -> pb.SyncSequencesResponse:
        await self.gate.wait()
        self._check(request.scheduler_epoch, request.manager_epoch)
        if request.sync_number == self._sync_number:
            return self._answer
        assert request.sync_number == self._sync_number + 1
        self._sync_number = request.sync_number
        self.syncs += 1
        answer = pb.SyncSequencesResponse(manager_epoch=self.epoch, lease_duration=duration_pb2.Duration(seconds=3))
        self._progress(request, answer)
        for handle in request.released_handles:
            if handle in self.live:
                self._release(self.live[handle], answer)
            else:
                answer.unknown_handles.append(handle)
        for handle, keep in zip(request.trimmed_handles, request.trimmed_capacity_tokens, strict=True):
            self._trim(self.live[handle], keep)
        for ticket in request.cancelled_tickets:
            self.confirm(ticket)
        for handle in request.handles:
            if handle in self.live:
                self._extend(self.live[handle], answer)
        for live in list(self.live.values()):
            if live.sequence_id in self.void_next:
                self.void_next.discard(live.sequence_id)
                live.void = True
                answer.void_handles.append(live.handle)
        answer.free_blocks, answer.total_blocks = self.free, self.num_blocks
        self._answer = answer
        await self._notify()
        return answer

    def _check(self, scheduler_epoch: int, manager_epoch: int) -> None:
        if manager_epoch != self.epoch or scheduler_epoch != self._scheduler_epoch:
            raise LostError("register again")

    def _match(self, token_ids: list[int]) -> list[Block]:
        shared = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            block = self._index.get(tuple(token_ids[:end]))
            if block is None:
                break
            shared.append(block)
        return shared

    def _claim(self, block: Block) -> None:
        self._cached.pop(block.slot, None)
        block.references += 1

    def _take(self) -> Block:
        if self._free:
            block = self._free.pop()
        else:
            block = self._cached.pop(next(iter(self._cached)))
            assert block.key is not None
            del self._index[block.key]
            block.key = None
        block.references = 1
        return block

    def _promise(self, live: Live) -> None:
        """Full blocks of known tokens are in the index from now on, computed or not."""
        if not live.store:
            return
        for index in range(len(live.token_ids) // self.block_size):
            key = tuple(live.token_ids[: (index + 1) * self.block_size])
            block = live.blocks[index] if index < len(live.blocks) else None
            if block is not None and block.key is None and key not in self._index:
                block.key, block.writer = key, live.handle
                self._index[key] = block

    def _progress(self, request: pb.SyncSequencesRequest, answer: pb.SyncSequencesResponse) -> None:
        start = 0
        columns = zip(request.handles, request.computed_tokens, request.new_token_counts, strict=True)
        for handle, computed, count in columns:
            tokens = request.new_token_ids[start : start + count]
            start += count
            live = self.live.get(handle)
            if live is None:
                answer.unknown_handles.append(handle)
                continue
            live.token_ids += tokens
            if not live.computed <= computed <= min(len(live.token_ids), len(live.blocks) * self.block_size):
                self.faults.append(f"{live.sequence_id} says it computed {computed} of {len(live.token_ids)}")
            live.computed = computed
            self._promise(live)
            for block in live.blocks[: computed // self.block_size]:
                if block.writer == handle:
                    block.writer = 0
        assert start == len(request.new_token_ids)

    def _release(self, live: Live, answer: pb.SyncSequencesResponse | None = None) -> None:
        del self.live[live.handle]
        for block in live.blocks:
            if block.writer == live.handle:
                assert block.key is not None
                del self._index[block.key]
                block.key, block.writer = None, 0
            self._drop(block)
        for other in self.live.values():
            if answer is not None and other.wait_for == live.handle and other.cached > live.computed:
                answer.void_handles.append(other.handle)

    def _drop(self, block: Block) -> None:
        block.references -= 1
        if block.references == 0:
            if block.key is None:
                self._free.append(block)
            else:
                self._cached[block.slot] = block

    def _trim(self, live: Live, keep: int) -> None:
        self.trims += 1
        while len(live.blocks) * self.block_size > keep:
            self._drop(live.blocks.pop())

    def _extend(self, live: Live, answer: pb.SyncSequencesResponse) -> None:
        slots = []
        while len(live.blocks) * self.block_size < live.computed + AHEAD:
            needed = len(live.blocks) * self.block_size < live.computed + 2
            if self.free < (1 if needed else 1 + self.num_blocks // 10):
                answer.blocks_short += needed
                break
            block = self._take()
            live.blocks.append(block)
            slots.append(block.slot)
        if slots:
            answer.extended_handles.append(live.handle)
            answer.extended_groups.append(0)
            answer.extended_counts.append(len(slots))
            answer.extended_slots.extend(slots)
